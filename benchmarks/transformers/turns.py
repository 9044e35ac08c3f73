"""Turns: the same prompts to one engine, then to the next; the order changes every time.

    measure(TINY, started)    # `started()` is a context of three engines, one of each of NAMES

An engine is a function here: of a turn's prompts and how many tokens each is answered with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import permutations
from statistics import median
from typing import Any, NamedTuple

from benchmarks.pages import Table
from benchmarks.transformers.comparison import AGAIN, ELASTIC, NAMES, STOCK, headings, row
from benchmarks.transformers.workload import AT_ONCE, Load

_ORDERS = list(permutations(NAMES))
"""In six turns each engine comes first, second and last twice, and after each other one."""


class Answered(NamedTuple):
    """What an engine made of a turn's prompts, which it got all at once."""

    total_s: float
    """From the first prompt handed in to the last answer."""
    cpu_s: float
    """User and system, of all its processes."""
    tokens: list[list[int]]
    cached_tokens: int = 0
    """Of the prompts, that the prefix cache had; where the engine says it."""


Ask = Callable[[list[list[int]], list[int]], Answered]


@dataclass(frozen=True)
class Turn:
    """What one engine made of one turn."""

    engine: str
    start: int
    number: int
    total_s: float
    cpu_s: float
    tokens: int
    machine_load: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s

    @property
    def cpu_us_a_token(self) -> float:
        return 1e6 * self.cpu_s / self.tokens


def measure(load: Load, started: Callable[[], AbstractContextManager[Mapping[str, Ask]]]) -> Table:
    """All turns of a load; raises what `started` and its engines raise."""
    turns: dict[str, list[Turn]] = {name: [] for name in NAMES}
    differing = {AGAIN: 0, ELASTIC: 0}
    asked = 0
    for start in range(load.starts):
        with started() as engines:
            for index in range(-1, load.turns):
                # Other prompts after every start: else a stall of one prompt's would come again.
                turn_number = start * (load.turns + 1) + index + 1
                answers = {}
                for name in _ORDERS[turn_number % len(_ORDERS)]:
                    answered = engines[name](load.prompts(turn_number), load.answers(turn_number))
                    answers[name] = answered.tokens
                    if index >= 0:
                        turns[name].append(_turn(name, start, turn_number, answered))
                asked += len(answers[STOCK])
                for name in differing:
                    pairs = zip(answers[name], answers[STOCK], strict=True)
                    differing[name] += sum(one != other for one, other in pairs)
                if index >= 0:
                    _say(load, turns)
    tokens_per_s = [[turn.tokens_per_s for turn in turns[name]] for name in NAMES]
    cpu_us = [[turn.cpu_us_a_token for turn in turns[name]] for name in NAMES]
    return Table(
        headings(*NAMES),
        [
            row("tokens a second", *tokens_per_s, more_is_better=True),
            row("CPU time of a token, us", *cpu_us, more_is_better=False),
        ],
        [
            f"Started {load.starts} times; {load.turns} turns of {AT_ONCE} prompts at once after"
            f" each start. Tokens a turn: {median(t.tokens for t in turns[STOCK]):,.0f}. Load while"
            f" it ran: {median(t.machine_load for t in turns[STOCK]):.1f}.",
            f"Prompts answered otherwise than by stock, of {asked} (uncounted turns too):"
            f" {differing[AGAIN]} by stock again, {differing[ELASTIC]} with kvelastic.",
        ],
        {"load": _plain(load), "turns": [asdict(t) for name in NAMES for t in turns[name]]},
    )


def _turn(name: str, start: int, number: int, answered: Answered) -> Turn:
    tokens = sum(map(len, answered.tokens))
    load = os.getloadavg()[0]
    return Turn(name, start, number, answered.total_s, answered.cpu_s, tokens, load)


def _plain(load: Load) -> dict[str, Any]:
    fields = asdict(load)
    return {name: str(one) if isinstance(one, range) else one for name, one in fields.items()}


def _say(load: Load, turns: dict[str, list[Turn]]) -> None:
    stock, again, elastic = (turns[name][-1] for name in NAMES)
    print(
        f"  {time.strftime('%H:%M:%S')} {load.model} turn {stock.number}:"
        f" {elastic.tokens_per_s:,.0f} tok/s, {elastic.tokens_per_s / stock.tokens_per_s:.3f} of"
        f" stock (control {again.tokens_per_s / stock.tokens_per_s:.3f}),"
        f" CPU {elastic.cpu_s / stock.cpu_s:.3f} ({again.cpu_s / stock.cpu_s:.3f}),"
        f" load {stock.machine_load:.1f}",
        flush=True,
    )
