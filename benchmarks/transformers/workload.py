"""What is asked of the engines, and how often: every number of this benchmark.

Prompts are drawn by the number of the turn, so all engines get the same ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

AT_ONCE = 16
PREFIX_TOKENS = 64
PREFIXES = 4
"""Every second prompt begins with one of these, in all turns the same: whole blocks."""
_WORDS = range(3, 512)
"""Token ids that both models have."""


@dataclass(frozen=True)
class Load:
    """Turns of `AT_ONCE` prompts that all enter the same step."""

    model: str
    starts: int
    """How often all engines start anew: where a process's memory comes to lie is luck."""
    turns: int
    """After each start, at each engine; one more before them is not counted."""
    num_blocks: int
    """Capacity of each engine's cache."""
    prompt_tokens: range
    """Without the prefix."""
    answer_tokens: range

    def prompts(self, turn: int) -> list[list[int]]:
        """Of one turn."""
        always, pick = random.Random("prefixes"), random.Random(f"{self.model} {turn}")
        prefixes = [always.choices(_WORDS, k=PREFIX_TOKENS) for _ in range(PREFIXES)]
        return [
            (prefixes[index // 2 % PREFIXES] if index % 2 else [])
            + pick.choices(_WORDS, k=pick.choice(self.prompt_tokens))
            for index in range(AT_ONCE)
        ]

    def answers(self, turn: int) -> list[int]:
        """How many tokens each prompt of a turn is answered with."""
        pick = random.Random(f"{self.model} answers {turn}")
        return [pick.choice(self.answer_tokens) for _ in range(AT_ONCE)]

    def shortened(self) -> Load:
        """To show that it runs."""
        return replace(self, starts=1, turns=2)


SMOLLM2 = Load("smollm2", 3, 4, 256, range(8, 32), range(16, 32))
"""A turn takes seconds, nearly all of it the model. At most 64 of the 256 blocks are in use."""
TINY = Load("tiny", 3, 24, 1024, range(8, 200), range(64, 128))
"""A step takes milliseconds, most of them transformers' own Python: what kvelastic adds shows most.
Prompts of several turns fill the cache, so cached blocks are evicted all the time."""
