"""vLLM in one process, asked by lines: `vllm_engine.py MODEL KIND [ADAPTER...]`.

A line is `{"load": NAME, "round": N}`; the answer is one line of JSON with what the round took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from vllm_server import BLOCK_TOKENS

from benchmarks.alone.loads import KV_TOKENS, LOADS, Load

KV_BYTES_A_TOKEN = 4 * 2 * 2 * 32 * 4
"""Of the tiny model: layers, K and V, heads, head_dim, float32."""
SPECULATIVE_TOKENS = max(load.speculative_tokens for load in LOADS)


@dataclass
class Round:
    """What one round took; of several turns, the last."""

    wall_s: float
    cpu_s: float
    prompt_tokens: int
    hit_tokens: int
    preemptions: int
    answers: list[list[int]]


class Engine:
    """One engine; a round begins with an empty prefix cache."""

    def __init__(self, model: str, kind: str, adapters: list[str]) -> None:
        from vllm import LLM

        more: dict[str, Any] = {}
        if kind == "lora":
            more = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 8}
        if kind == "speculative":
            more["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": SPECULATIVE_TOKENS,
                "prompt_lookup_max": 2,
                "prompt_lookup_min": 1,
            }
        self._llm = LLM(
            model,
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=64,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            kv_cache_memory_bytes=KV_TOKENS * KV_BYTES_A_TOKEN,
            **more,
        )
        self._adapters = adapters
        self._preemptions = 0
        core: Any = self._llm.llm_engine.engine_core
        self._count_preemptions(core.engine_core.scheduler)

    def _count_preemptions(self, scheduler: Any) -> None:
        schedule = scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._preemptions += len(output.preempted_req_ids or ())
            return output

        scheduler.schedule = counted

    def round(self, load: Load, number: int) -> Round:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self._llm.reset_prefix_cache()
        sampling = SamplingParams(
            n=load.answers,
            temperature=1.0 if load.answers > 1 else 0.0,
            seed=number if load.answers > 1 else None,
            max_tokens=load.new_tokens,
            ignore_eos=True,
        )
        prompts = load.first_prompts(number)
        adapters = [
            LoRARequest(f"adapter{index}", index + 1, self._adapters[index])
            for index in range(load.adapters)
        ]
        for turn in range(load.turns):
            before, cpu_begin_s, begin_s = self._preemptions, time.process_time(), time.monotonic()
            outputs = self._llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                sampling,
                use_tqdm=False,
                lora_request=[adapters[i % len(adapters)] for i in range(len(prompts))]
                if adapters
                else None,
            )
            found = Round(
                time.monotonic() - begin_s,
                time.process_time() - cpu_begin_s,
                sum(map(len, prompts)),
                sum(one.num_cached_tokens or 0 for one in outputs),
                self._preemptions - before,
                [list(answer.token_ids) for one in outputs for answer in one.outputs],
            )
            if turn + 1 < load.turns:
                prompts = load.next_prompts(number, turn, prompts, found.answers)
        return found


def main(model: str, kind: str, *adapters: str) -> None:
    # What vLLM prints goes to stderr: stdout is for the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine(model, kind, list(adapters))
    loads = {load.name: load for load in LOADS}
    print("ready", file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asdict(engine.round(loads[asked["load"]], asked["round"]))), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
