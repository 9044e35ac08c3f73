"""vLLM without a server: `inprocess_engine.py MODEL REQUESTS_JSON TOKENS_JSON [RANKS]`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(model: str, requests: str, tokens: str, ranks: str = "1") -> None:
    from vllm import LLM, SamplingParams
    from vllm_server import BLOCK_TOKENS, KV_BYTES, MAX_MODEL_TOKENS

    engine = LLM(
        model,
        dtype="float32",
        max_model_len=MAX_MODEL_TOKENS,
        max_num_seqs=16,
        enforce_eager=True,
        tensor_parallel_size=int(ranks),
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=KV_BYTES,
    )
    wanted = json.loads(Path(requests).read_text())
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in wanted],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in wanted],
        use_tqdm=False,
    )
    name = os.environ.get("KVELASTIC_IPC_NAME")
    if name is not None:
        from open_memfds import held_bytes

        from kvelastic.shared import ledger, segment

        assert segment.inspect(name).usage["mapped_bytes"] > 0
        assert segment.inspect(name).header["pid"] == os.getpid()
        members = [member for info in ledger.list_ledgers() for member in info.members]
        (is_idle,) = [member.is_idle for member in members if member.name == name]
        assert is_idle is True, "no request is left"
        engine.llm_engine.engine_core.shutdown()
        members = [member for info in ledger.list_ledgers() for member in info.members]
        granted_bytes = sum(one.granted_bytes for one in members if one.pid == os.getpid())
        assert held_bytes(os.getpid()) <= granted_bytes, "memory is held and may be granted again"
    Path(tokens).write_text(json.dumps([list(one.outputs[0].token_ids) for one in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
