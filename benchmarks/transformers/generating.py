"""Generates with each cache in turn: `generating.py MODEL ROUNDS NEW_TOKENS STOCK AGAIN ELASTIC`.

The last three are what the caches are called in its answer, JSON on stdout.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

SEQUENCES = 4
PROMPT_TOKENS = 128


def main(folder: str, rounds: int, new_tokens: int, names: list[str]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from kvelastic.integration.transformers import ElasticCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    prompts = torch.randint(3, 512, (SEQUENCES, PROMPT_TOKENS))
    mask = torch.ones_like(prompts)
    *stock, elastic = names

    def make_cache(name: str) -> AbstractContextManager[Any]:
        if name == elastic:
            cache: AbstractContextManager[Any] = ElasticCache.for_model(model)
            return cache
        return nullcontext(DynamicCache(config=model.config))

    def generate(name: str) -> torch.Tensor:
        with make_cache(name) as cache:
            return model.generate(
                prompts,
                attention_mask=mask,
                past_key_values=cache,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )

    samples: dict[str, dict[str, list[float]]] = {
        name: {"tokens_per_s": [], "cpu_us_a_token": []} for name in names
    }
    expected = generate(stock[0])
    generate(elastic)  # warms up, too
    differing = 0
    tokens = SEQUENCES * new_tokens
    orders = itertools.cycle(itertools.permutations(names))
    for _ in range(rounds):
        for name in next(orders):
            begin_s, cpu_begin_s = time.perf_counter(), time.process_time()
            answer = generate(name)
            samples[name]["tokens_per_s"].append(tokens / (time.perf_counter() - begin_s))
            cpu_s = time.process_time() - cpu_begin_s
            samples[name]["cpu_us_a_token"].append(1e6 * cpu_s / tokens)
            differing += int((answer != expected).any(dim=1).sum())
    counts = {"sequences": SEQUENCES, "prompt_tokens": PROMPT_TOKENS, "differing": differing}
    return {**samples, **counts}


if __name__ == "__main__":
    # The answer goes out where stdout was; nothing else does.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        json.dump(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]), answers)
