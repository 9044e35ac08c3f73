"""Continuous batching of transformers on an elastic cache: the tokens of stock.

A tiny random Llama, the same prompts twice (the second time their prefixes are cached), stock and
with ENABLE_KVELASTIC, each in a process of its own. What a page holds is seen in the segment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.gpu.findings import Findings

PROMPTS, SHORTEST, LONGEST = 16, 40, 200
VOCABULARY = 512
ROUNDS = 2


def main() -> None:
    def child(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--child", action="store_true")

    with Findings.of_command(__doc__, child) as found:
        new_tokens = 8 if found.quick else 64
        if found.arguments.child:
            print(json.dumps(_generate(new_tokens)))
            return
        told: dict[str, dict[str, Any]] = {}
        for kind, environ in (("stock", {}), ("elastic", {"ENABLE_KVELASTIC": "true"})):
            command = [
                sys.executable,
                "-m",
                "benchmarks.gpu.steps.transformers_batching",
                "--child",
            ]
            done = subprocess.run(
                command + ["--quick"] * found.quick,
                check=False,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | environ,
            )
            if done.returncode != 0:
                found.check(f"{kind} generates", False, f"exit code {done.returncode}")
                return
            told[kind] = json.loads(done.stdout.splitlines()[-1])
        stock, elastic = told["stock"], told["elastic"]
        found.line(f"transformers {stock['version']}, {stock['device']}.")
        found.check("stock runs without kvelastic", not stock["instances"])
        found.check(
            "the cache is kvelastic's", bool(elastic["instances"]), str(elastic["instances"])
        )
        answers = [list(itertools.chain(*each["tokens"])) for each in (stock, elastic)]
        pairs = list(zip(*answers, strict=True))
        differing = sum(a != b for one, other in pairs for a, b in zip(one, other, strict=True))
        count = sum(len(one) for one, _ in pairs)
        found.figure("tokens", count)
        found.figure("differing_tokens", differing)
        found.check("the tokens of stock", differing == 0, f"{differing} of {count} tokens differ")
        distinct = len({token for one, _ in pairs for token in one})
        found.check("tokens vary, so a wrong one shows", distinct > 20, f"{distinct} distinct")


def _generate(new_tokens: int) -> dict[str, Any]:
    """In a process of its own."""
    if "ENABLE_KVELASTIC" in os.environ:
        # Nothing is installed: no .pth does it.
        from kvelastic.startup import arm

        arm()
    import random

    import torch
    import transformers
    from transformers import ContinuousBatchingConfig, GenerationConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
        # Large weights: greedy answers vary with every token of the prompt, and wrong KV shows.
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    model = model.eval().to(device)
    chance = random.Random(3)
    prompts = [
        [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(SHORTEST, LONGEST))]
        for _ in range(PROMPTS)
    ]
    generation = GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=256)
    tokens = []
    for _ in range(ROUNDS):
        answers = model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,  # the second round finds the first one's prefixes
        )
        # A request's name ends with its number.
        names = sorted(answers, key=lambda name: int(name.rpartition("_")[2]))
        tokens.append([list(answers[name].generated_tokens) for name in names])
    instances = _own_instances()
    model.destroy_cached_continuous_batching_manager()
    return {
        "version": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "tokens": tokens,
        "instances": instances,
    }


def _own_instances() -> list[str]:
    if "kvelastic" not in sys.modules:
        return []
    from kvelastic.shared.segment_listing import list_segments

    return [info.name for info in list_segments() if info.header.get("pid") == os.getpid()]


if __name__ == "__main__":
    main()
