"""Serves tiny models one after the other in this process: `architectures_engine.py OUT NAME...`

OUT becomes a JSON object: for each name the tokens of three rounds of the same requests, or the
error that the model could not be served with. The second round finds prompts in the prefix cache;
before the third, an instance of kvelastic, if there is one, sleeps, wakes, and is limited.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tiny_architectures import ARCHITECTURES, Architecture

MAX_MODEL_TOKENS = 512
NAME = os.environ.get("KVELASTIC_IPC_NAME")
MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
KV_BYTES = int(0.9 * MACHINE_BYTES) if NAME else 64 << 20
"""With kvelastic nearly all of the machine's memory, which stock vLLM would refuse: so much is not
free, and need not be."""
NOT_EXACT = ("gated_delta",)
"""What answers differently, in stock vLLM too, when requests are batched otherwise, as they are
under a limit: bfloat16 shows it. So these are not limited."""


def prompts() -> list[list[int]]:
    """Every second one begins as the others do, and some are longer than any window."""
    pick = random.Random(5)
    shared = [pick.randrange(3, 512) for _ in range(128)]
    own = [[pick.randrange(3, 512) for _ in range(pick.randrange(10, 160))] for _ in range(8)]
    return [(shared if index % 2 else []) + one for index, one in enumerate(own)]


def rounds(engine: Any, architecture: Architecture) -> list[list[list[int]]]:
    from vllm import SamplingParams

    wanted = [{"prompt_token_ids": prompt} for prompt in prompts()]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def ask() -> list[list[int]]:
        outputs = engine.generate(wanted, sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]

    answers = [ask(), ask()]
    if NAME is not None:
        _through_sleep_to_a_limit(engine, architecture.name not in NOT_EXACT)
    return [*answers, ask()]


def _through_sleep_to_a_limit(engine: Any, exact: bool) -> None:
    from kvelastic import segment

    usage = segment.inspect(NAME).usage
    assert usage["mapped_bytes"] > 0, "the model has a cache of its own beside this"
    engine.sleep(level=1)
    assert segment.inspect(NAME).usage["mapped_bytes"] == 0
    engine.wake_up()
    if exact:
        least = usage["page_bytes"] * max(usage["pages_mapped"] // 2, 2)
        answer = segment.wish(NAME, limit_bytes=least, wait_s=10)
        assert answer.state == "applied"


def serve(name: str, folder: str) -> list[list[list[int]]]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    architecture = ARCHITECTURES[name]
    architecture.write(folder)
    arguments = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_TOKENS,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_BYTES,
        **architecture.engine_args(folder),
    }
    engine = LLM(folder, **arguments)
    try:
        return rounds(engine, architecture)
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


def main(out: str, *names: str) -> None:
    answers: dict[str, Any] = {}
    for name in names:
        with TemporaryDirectory() as folder:
            try:
                answers[name] = serve(name, folder)
            except Exception as error:
                answers[name] = f"{type(error).__name__}: {error}"
        Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
