"""What a server on its own is asked: every number of this benchmark.

Prompts are drawn by the name of the load and the number of the round, so all engines get the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

KV_TOKENS = 48 * 1024
"""What the KV cache of every engine has room for."""
VOCABULARY = range(3, 512)
"""Token ids of the tiny model."""


@dataclass(frozen=True)
class Load:
    """One kind of traffic: all of a round's prompts are sent at once."""

    name: str
    title: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    shared_tokens: int = 0
    """With which every prompt begins."""
    answers: int = 1
    """Of each prompt."""
    turns: int = 1
    """Of each conversation; the last one counts. A turn adds the answer and `more_tokens`."""
    more_tokens: int = 32
    adapters: int = 0
    """LoRA adapters that take turns."""
    speculative_tokens: int = 0
    """That the engine proposes by prompt lookup."""

    def first_prompts(self, number: int) -> list[list[int]]:
        """Return the prompts of a round's first turn."""
        pick = random.Random(f"{self.name} {number}")
        shared = pick.choices(VOCABULARY, k=self.shared_tokens)
        own_tokens = self.prompt_tokens - self.shared_tokens
        return [shared + pick.choices(VOCABULARY, k=own_tokens) for _ in range(self.prompts)]

    def next_prompts(
        self, number: int, turn: int, prompts: list[list[int]], answers: list[list[int]]
    ) -> list[list[int]]:
        """Return the prompts of the turn after `prompts` were answered with `answers`."""
        pick = random.Random(f"{self.name} {number} {turn}")
        return [
            prompt + answer + pick.choices(VOCABULARY, k=self.more_tokens)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


MULTI_TURN = Load(
    "multi_turn", "48 conversations of 640 tokens, the second turn", 48, 640, 16, turns=2
)
LOADS = (
    Load("one_stream", "one request, 400 tokens answered", 1, 64, 400),
    Load("short_prompts", "64 prompts of 32 tokens", 64, 32, 16),
    Load("long_prompts", "16 prompts of 1,500 tokens", 16, 1500, 8),
    Load("shared_prefix", "32 prompts that share 1,024 tokens", 32, 1056, 16, shared_tokens=1024),
    Load("four_answers", "12 prompts, four answers each", 12, 128, 32, answers=4),
    Load("overflow", "64 prompts of 1,000 tokens, more than fit", 64, 1000, 100),
    MULTI_TURN,
    Load("lora", "32 prompts over two LoRA adapters", 32, 128, 32, adapters=2),
    Load("speculative", "16 prompts, speculative decoding", 16, 128, 64, speculative_tokens=3),
)


def engine_kinds() -> Iterator[tuple[str, list[Load]]]:
    """Yield the loads of each kind of engine: LoRA and speculation are decided at its start."""
    yield "plain", [one for one in LOADS if not one.adapters and not one.speculative_tokens]
    yield "lora", [one for one in LOADS if one.adapters]
    yield "speculative", [one for one in LOADS if one.speculative_tokens]
