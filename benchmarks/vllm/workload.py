"""What is asked of both servers, and how much memory they have: every number of this benchmark.

Prompts and answers are drawn by the number of the turn, so both servers get the same ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from engine_server import Request
from vllm_server import BLOCK_TOKENS

PREFIX_TOKENS = 3 * BLOCK_TOKENS
PREFIXES = 4
"""Every second request begins with one of these, in all turns the same: whole blocks."""
_WORDS = range(3, 512)
"""Token ids that both models have."""


@dataclass(frozen=True)
class Load:
    """One kind of traffic: a turn of it goes to one server, then the same to the other."""

    name: str
    title: str
    turns: int
    """At each server."""
    requests: int
    """Of one turn."""
    at_once: int
    """Clients; each sends its next request when the one before has ended."""
    kv_blocks: int
    """Of 32 tokens, for each server."""
    prompt_tokens: range
    """Without the prefix."""
    answer_tokens: range

    def turn(self, number: int) -> list[Request]:
        """The requests of one turn; the prefixes are those of every turn."""
        always, pick = random.Random("prefixes"), random.Random(f"{self.name} {number}")
        prefixes = [always.choices(_WORDS, k=PREFIX_TOKENS) for _ in range(PREFIXES)]
        return [
            Request(
                (prefixes[index // 2 % PREFIXES] if index % 2 else [])
                + pick.choices(_WORDS, k=pick.choice(self.prompt_tokens)),
                pick.choice(self.answer_tokens),
            )
            for index in range(self.requests)
        ]

    def with_turns(self, turns: int) -> Load:
        return replace(self, turns=turns)


MIXED = Load(
    "mixed", "16 at once, shared prefixes, staggered lengths",
    turns=40, requests=50, at_once=16, kv_blocks=512,
    prompt_tokens=range(8, 300), answer_tokens=range(16, 100),
)  # fmt: skip
"""16 of the largest requests need 256 blocks, so there is a prefix cache too, and it overflows."""
SATURATED = Load(
    "saturated", "64 at once in memory for a quarter of them: requests are preempted all the time",
    turns=24, requests=80, at_once=64, kv_blocks=96,
    prompt_tokens=range(8, 64), answer_tokens=range(32, 160),
)  # fmt: skip
"""A request begins with 1 to 5 blocks and ends with up to 10; 64 of them would end with 380."""
