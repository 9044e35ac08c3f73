"""Turns: the same prompts to one engine, then to the next; the order changes every time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

from transformers_process import TransformersEngine

from benchmarks.transformers.comparison import headings, row
from benchmarks.transformers.engines import AGAIN, BLOCK_TOKENS, ELASTIC, NAMES, STOCK, started
from benchmarks.transformers.results import Table
from benchmarks.transformers.workload import AT_ONCE, Load

_ORDERS = list(permutations(NAMES))
"""In six turns each engine comes first, second and last twice, and after each other one."""
_TURN_DEADLINE_S = 500.0


@dataclass(frozen=True)
class Turn:
    """What one engine made of one turn."""

    engine: str
    start: int
    number: int
    total_s: float
    """From the first prompt handed in to the last answer."""
    cpu_s: float
    """User and system, of the whole process."""
    tokens: int
    machine_load: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s

    @property
    def cpu_us_a_token(self) -> float:
        return 1e6 * self.cpu_s / self.tokens


def measure(load: Load, arguments: Sequence[str], folder: Path) -> Table:
    """All turns of a load; raises what `started` raises."""
    turns: dict[str, list[Turn]] = {name: [] for name in NAMES}
    differing = {AGAIN: 0, ELASTIC: 0}
    asked = 0
    shape = ["--block-tokens", str(BLOCK_TOKENS), "--num-blocks", str(load.num_blocks), *arguments]
    for start in range(load.starts):
        with started(folder, dict.fromkeys(NAMES, shape)) as engines:
            for index in range(-1, load.turns):
                # Other prompts after every start: else a stall of one prompt's would come again.
                turn_number = start * (load.turns + 1) + index + 1
                answers = {}
                for name in _ORDERS[turn_number % len(_ORDERS)]:
                    turn, answers[name] = _turn(engines[name], name, load, start, turn_number)
                    if index >= 0:
                        turns[name].append(turn)
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
            f" each start. Load while it ran: {median(t.machine_load for t in turns[STOCK]):.1f}.",
            f"Prompts answered otherwise than by stock, of {asked} (uncounted turns too):"
            f" {differing[AGAIN]} by stock again, {differing[ELASTIC]} with kvelastic.",
        ],
        {"load": _plain(load), "turns": [asdict(t) for name in NAMES for t in turns[name]]},
    )


def _turn(
    engine: TransformersEngine, name: str, load: Load, start: int, turn: int
) -> tuple[Turn, list[list[int]]]:
    answer = engine.ask(
        "timed",
        _TURN_DEADLINE_S + 30,
        prompts=load.prompts(turn),
        max_new_tokens=load.answers(turn),
        timeout_s=_TURN_DEADLINE_S,
    )
    failed = answer["refused"] or answer["errors"] or answer["unfinished"]
    assert not failed, f"{name}: {failed}\n{engine.tail()}"
    tokens = [answer["tokens"][each] for each in answer["ids"]]
    taken = Turn(
        engine=name,
        start=start,
        number=turn,
        total_s=answer["total_s"],
        cpu_s=answer["cpu_s"],
        tokens=sum(map(len, tokens)),
        machine_load=os.getloadavg()[0],
    )
    return taken, tokens


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
