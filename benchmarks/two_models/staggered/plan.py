"""What is sent in one burst and how much memory there is for it, by the speed of the machine.

Held constant is what a burst needs at once, as a part of a half of the budget:

    part = conversations * blocks(prompt + answer) / blocks of a half

For that all conversations must be under way at once. So a burst comes within half of the time that
its answers take, whatever the processor: the answer's time follows from the measured step, and
answers get longer where the machine computes prompts so slowly that they would hold up the burst.
Pure: no clock is read here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.two_models.calibration import PROMPT_TOKENS, REQUESTS, Speed
from benchmarks.two_models.workload import BLOCK_BYTES, BLOCK_TOKENS, PAGE_BYTES

PART = 1.6
"""Of a half: what kvcached's published schedule needs (110 thousand tokens where 70 fit)."""
CONVERSATIONS = REQUESTS
FIRST_PROMPT_TOKENS = PROMPT_TOKENS
FIRST_ANSWER_TOKENS = 32
QUESTION_TOKENS = 32
"""What is new in a later turn."""
_LEAST_ANSWER_TOKENS = 128
_MOST_ANSWER_TOKENS = 384
_SPREAD = 0.5
"""A burst's arrivals, by the time that its answers take: 5 s for answers of 10 in the original."""
_MOST_LOAD = 0.5
"""Of the time in which a burst comes, what computing its new tokens may take."""
_SEED_LOAD = 0.8
"""The same where the conversations begin and all of their tokens are new."""


@dataclass(frozen=True)
class Turn:
    """One turn of every conversation that takes part in it."""

    number: int
    """From 1."""
    conversations: int
    prompt_tokens: int
    answer_tokens: int
    over_s: float
    """The time in which they come."""

    @property
    def blocks(self) -> int:
        """Of one conversation, at the end of its answer."""
        return math.ceil((self.prompt_tokens + self.answer_tokens) / BLOCK_TOKENS)

    @property
    def blocks_at_once(self) -> int:
        """With all conversations under way."""
        return self.conversations * self.blocks


@dataclass(frozen=True)
class Plan:
    """The whole of it."""

    speed: Speed
    turns: tuple[Turn, Turn, Turn]
    """The conversations begin; all go on in a burst; as many come back as need as much memory."""
    budget_pages: int

    @property
    def budget_bytes(self) -> int:
        """Of both models together."""
        return self.budget_pages * PAGE_BYTES

    @property
    def half_bytes(self) -> int:
        """What each has where the budget is divided."""
        return self.budget_bytes // 2

    @property
    def half_blocks(self) -> int:
        """What stock vLLM makes of it."""
        return self.half_bytes // BLOCK_BYTES

    @property
    def part(self) -> float:
        """What the first burst needs at once, as a part of a half."""
        return self.turns[1].blocks_at_once / self.half_blocks

    @property
    def answer_s(self) -> float:
        """How long an answer takes with all conversations under way."""
        return self.turns[1].answer_tokens * self.speed.step_s

    @property
    def probe_every_s(self) -> float:
        """How often the model that has nothing else to do is asked a little."""
        return self.answer_s / 2


def new_tokens(prompt_tokens: int, history_tokens: int) -> int:
    """Of a prompt those that no cache can have: the last token of an answer was never computed."""
    return prompt_tokens - (history_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def plan_for(speed: Speed) -> Plan:
    """Scale the schedule to a machine. Raises ValueError for an invalid speed."""
    if not (0 < speed.prompt_tokens_per_s < math.inf and 0 < speed.step_s < math.inf):
        raise ValueError(f"invalid speed: {speed}")
    first = Turn(
        1,
        CONVERSATIONS,
        FIRST_PROMPT_TOKENS,
        FIRST_ANSWER_TOKENS,
        CONVERSATIONS * FIRST_PROMPT_TOKENS / speed.prompt_tokens_per_s / _SEED_LOAD,
    )
    history = FIRST_PROMPT_TOKENS + FIRST_ANSWER_TOKENS
    prompt = history + QUESTION_TOKENS
    computing_s = CONVERSATIONS * new_tokens(prompt, history) / speed.prompt_tokens_per_s
    answer = _answer_tokens(computing_s, speed.step_s)
    over_s = _SPREAD * answer * speed.step_s
    burst = Turn(2, CONVERSATIONS, prompt, answer, over_s)

    prompt = prompt + answer + QUESTION_TOKENS
    comes_back = Turn(3, 1, prompt, answer, over_s)
    conversations = min(CONVERSATIONS, round(burst.blocks_at_once / comes_back.blocks))
    comes_back = Turn(3, conversations, prompt, answer, over_s * conversations / CONVERSATIONS)

    budget_blocks = 2 * burst.blocks_at_once / PART
    pages = max(2, round(budget_blocks * BLOCK_BYTES / PAGE_BYTES))
    return Plan(speed, (first, burst, comes_back), pages)


def _answer_tokens(computing_s: float, step_s: float) -> int:
    """Whole blocks, as few as leave time for the prompts; the most there are on a slow machine."""
    for tokens in range(_LEAST_ANSWER_TOKENS, _MOST_ANSWER_TOKENS, BLOCK_TOKENS):
        if computing_s <= _MOST_LOAD * _SPREAD * tokens * step_s:
            return tokens
    return _MOST_ANSWER_TOKENS
