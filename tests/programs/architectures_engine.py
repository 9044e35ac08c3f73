"""Serves tiny models one after the other in this process: `architectures_engine.py OUT NAME...`

OUT becomes a JSON object: for each name its `dtype` and the tokens of three `rounds` of the same
requests, or the `error` that the model could not be served with. The second round finds prompts in
the prefix cache; before the third, an instance of kvelastic, if there is one, sleeps, wakes, and is
limited.

Which types a kernel takes depends on the processor: MLA has no float32 where there is AMX. A model
is served in the first of `TYPES` that vLLM runs here; with `--types-of OTHER_OUT` in the one that
another run of this program, which may still be at it, has found.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mended_deepseek_v4
import needs
from interpreted_triton import interpret_triton
from tiny_architectures import ARCHITECTURES, Architecture

MAX_MODEL_TOKENS = 512
NAME = os.environ.get("KVELASTIC_IPC_NAME")
STOCK_KV_BYTES = 64 << 20
TYPES = ("float32", "bfloat16", "float16")
EXACT_TYPE = "float32"
"""In the others answers differ, in stock vLLM too, when requests are batched otherwise, as they are
under a limit. So a model in another type is limited only if its requests run one by one."""
LOOK_EVERY_S = 0.1
FEW = 3
"""Requests where Triton's interpreter computes, with a third of the tokens."""


def prompts() -> list[list[int]]:
    """Every second one begins as the others do, and some are longer than any window."""
    pick = random.Random(5)
    shared = [pick.randrange(3, 512) for _ in range(128)]
    own = [[pick.randrange(3, 512) for _ in range(pick.randrange(10, 160))] for _ in range(8)]
    return [(shared if index % 2 else []) + one for index, one in enumerate(own)]


def rounds(
    engine: Any, exact: bool, adapters: list[str], *, is_slow: bool = False
) -> list[list[list[int]]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    asked = sorted(prompts(), key=len)[-FEW:] if is_slow else prompts()
    wanted = [{"prompt_token_ids": prompt} for prompt in asked]
    sampling = SamplingParams(temperature=0, max_tokens=8 if is_slow else 24, ignore_eos=True)
    loras = [
        LoRARequest(f"adapter{number}", number, path) for number, path in enumerate(adapters, 1)
    ]
    used = [loras[index % len(loras)] for index in range(len(wanted))] if loras else None

    def ask() -> list[list[int]]:
        outputs = engine.generate(wanted, sampling, use_tqdm=False, lora_request=used)
        return [list(one.outputs[0].token_ids) for one in outputs]

    answers = [ask(), ask()]
    if NAME is not None:
        _through_sleep_to_a_limit(engine, NAME, exact, 3 if is_slow else 2)
    return [*answers, ask()]


def _through_sleep_to_a_limit(engine: Any, name: str, exact: bool, fewest_pages: int) -> None:
    from kvelastic.shared import segment

    usage = segment.inspect(name).usage
    assert usage["mapped_bytes"] > 0, "the model has a cache of its own beside this"
    engine.sleep(level=1)
    assert segment.inspect(name).usage["mapped_bytes"] == 0
    engine.wake_up()
    if exact:
        least = usage["page_bytes"] * max(usage["pages_mapped"] // 2, fewest_pages)
        answer = segment.request(name, limit_bytes=least, wait_s=300)
        assert answer.state == "applied"


def kv_bytes() -> int:
    """With kvelastic nearly all of the memory that vLLM knows of, of one node where there are more:
    stock vLLM would refuse it, for so much is not free, and need not be."""
    if NAME is None:
        return STOCK_KV_BYTES
    from vllm.v1.worker.cpu_worker import get_allowed_cpu_list, get_memory_node_info

    node = get_allowed_cpu_list()[0].numa_node
    return int(0.9 * get_memory_node_info(node).total_memory)


def serve(architecture: Architecture, dtype: str, folder: str) -> list[list[list[int]]]:
    if not architecture.has_weights:
        mended_deepseek_v4.mend()
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    architecture.write(folder)
    arguments = {
        "max_model_len": MAX_MODEL_TOKENS,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "kv_cache_memory_bytes": kv_bytes(),
        **architecture.engine_args(folder),
        "dtype": dtype,
    }
    engine = None
    try:
        engine = LLM(folder, **arguments)
        numbers = range(1, architecture.adapters + 1)
        adapters = [architecture.adapter_folder(folder, number) for number in numbers]
        is_exact = dtype == EXACT_TYPE or arguments["max_num_seqs"] == 1
        return rounds(engine, is_exact, adapters, is_slow=not architecture.has_weights)
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


def types_of(architecture: Architecture) -> list[str]:
    """Its own first, then the exact one."""
    own = architecture.args.get("dtype", EXACT_TYPE)
    return [own, *(one for one in TYPES if one != own)]


def serve_in_one_of(types: list[str], serve: Callable[[str], Any]) -> dict[str, Any]:
    """The rounds in the first type that can be served, or the errors of all."""
    errors = []
    for dtype in types:
        try:
            return {"dtype": dtype, "rounds": serve(dtype)}
        except Exception as error:  # noqa: PERF203  (it is seconds of work)
            errors.append(f"{dtype}: {type(error).__name__}: {error}")
    return {"error": "; ".join(errors)}


def found_by(other: Path, name: str) -> list[str]:
    """The type in which another run has served it; none where it could not. Waits for that."""
    while True:
        answers = json.loads(other.read_text()) if other.exists() else {}
        if name in answers:
            return [answers[name]["dtype"]] if "dtype" in answers[name] else []
        time.sleep(LOOK_EVERY_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+", choices=ARCHITECTURES)
    parser.add_argument("--types-of", type=Path)
    given = parser.parse_args()
    if not all(ARCHITECTURES[name].has_weights for name in given.names):
        interpret_triton(needs.TRITON)
    answers: dict[str, Any] = {}
    for name in given.names:
        one = ARCHITECTURES[name]
        types = found_by(given.types_of, name) if given.types_of else types_of(one)
        with TemporaryDirectory() as folder:
            answers[name] = serve_in_one_of(types, lambda dtype: serve(one, dtype, folder))  # noqa: B023
        # The other run may be reading: it sees all of it or nothing.
        complete = given.out.with_suffix(".new")
        complete.write_text(json.dumps(answers))
        complete.replace(given.out)


if __name__ == "__main__":
    main()
