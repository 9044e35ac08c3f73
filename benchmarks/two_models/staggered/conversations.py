"""Conversations whose every turn continues what was said before, as users hold them.

    conversations = Conversations("a", plan)
    requests = conversations.requests(1)
    ...
    conversations.heard(1, answers)       # by the order of the requests
    conversations.requests(2)             # prompt and answer so far, and a new question

Pure: the same model, plan and answers make the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.two_models.client import WORDS, Request
from benchmarks.two_models.staggered.plan import QUESTION_TOKENS, Plan

_PROBE_TOKENS = 16
_PROBE_ANSWER_TOKENS = 8


class Conversations:
    """Those of one model, in one way."""

    def __init__(self, model: str, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        self._said: list[list[int]] = [[] for _ in range(plan.turns[0].conversations)]

    def taking_part(self, turn: int) -> list[int]:
        """Which conversations, in the order in which they come: another one in each turn."""
        order = list(range(len(self._said)))
        if turn > 1:
            random.Random(f"order of {self._model} in turn {turn}").shuffle(order)
        return order[: self._plan.turns[turn - 1].conversations]

    def requests(self, turn: int) -> list[Request]:
        """Evenly over the time that the plan gives them."""
        planned = self._plan.turns[turn - 1]
        apart_s = planned.over_s / planned.conversations
        return [
            Request(place * apart_s, self._prompt(index, turn), planned.answer_tokens)
            for place, index in enumerate(self.taking_part(turn))
        ]

    def heard(self, turn: int, answers: Sequence[Sequence[int]]) -> None:
        """What was answered to the requests of this turn becomes part of what was said."""
        for index, answer in zip(self.taking_part(turn), answers, strict=True):
            self._said[index] = [*self._prompt(index, turn), *answer]

    def _prompt(self, index: int, turn: int) -> list[int]:
        pick = random.Random(f"conversation {index} of {self._model}, turn {turn}")
        count = self._plan.turns[0].prompt_tokens if turn == 1 else QUESTION_TOKENS
        return [*self._said[index], *pick.choices(WORDS, k=count)]


def probe(model: str, number: int) -> Request:
    """The little that is asked of a model while the other one has its burst."""
    pick = random.Random(f"probe {number} of {model}")
    return Request(0.0, pick.choices(WORDS, k=_PROBE_TOKENS), _PROBE_ANSWER_TOKENS)
