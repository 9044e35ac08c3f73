"""A command that asks every rank for nothing but an answer: what is added to the drivers' own time.

It is posted, waited for and answered as a map is. Beside it the same round through other channels:
bare futexes (the floor), Unix sockets, pipes, pickled messages, and those as kvcached sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness import Figure
from benchmarks.ring.group import Group, Spent

BAR = "8 ranks: 50 us"
IN_TURNS = {
    "bare futexes": Group.bells_us,
    "sockets, all at once": Group.sockets_us,
    "sockets, one after another": Group.sockets_in_turn_us,
    "pipes, all at once": Group.pipes_us,
    "pickled over open sockets": Group.pickled_us,
}
AS_KVCACHED = "as kvcached"
APART = {"bare futexes": Group.bells_us, "sockets, all at once": Group.sockets_us}


@dataclass(frozen=True)
class Size:
    """How long it takes."""

    turns: int
    calls: int
    """In each turn, one right after another."""
    slow_calls: int
    """The same for what takes milliseconds."""
    pause_us: int = 0
    """Between two calls."""


FULL = Size(turns=40, calls=100, slow_calls=10)
QUICK = Size(turns=5, calls=50, slow_calls=4)
APART_FULL = Size(turns=50, calls=40, slow_calls=0, pause_us=1000)
APART_QUICK = Size(turns=5, calls=20, slow_calls=0, pause_us=1000)

Samples = dict[tuple[int, str], list[float]]


def _rows(
    groups: Sequence[Group], samples: Samples, beside: Sequence[str], bar_at: int
) -> list[Figure]:
    rows = []
    for group in groups:
        n = group.ranks
        ring = samples[n, "ring"]
        for number, name in enumerate(beside):
            title = f"{n} rank{'s' if n > 1 else ''}" if number == 0 else "  the same"
            bar = BAR if number == 0 and n == bar_at else ""
            rows.append(Figure(title, "us", ring, bar, name, samples[n, name]))
    return rows


def back_to_back(groups: Sequence[Group], size: Size) -> list[Figure]:
    """Commands without a break: nobody has fallen asleep for long."""
    samples: Samples = {}
    spent: dict[int, list[Spent]] = {group.ranks: [] for group in groups}

    def add(group: Group, name: str, take: Callable[..., list[float]], calls: int) -> None:
        samples.setdefault((group.ranks, name), []).extend(take(group, calls))

    for _ in range(size.turns):
        for group in groups:
            group.ring_us(5)
            before = group.spent()
            add(group, "ring", Group.ring_us, size.calls)
            spent[group.ranks].append(group.spent().since(before))
            for name, take in IN_TURNS.items():
                add(group, name, take, size.calls)
            add(group, AS_KVCACHED, Group.as_kvcached_us, size.slow_calls)
    rows = _rows(groups, samples, [*IN_TURNS, AS_KVCACHED], bar_at=8)
    commands = size.turns * size.calls
    for row in rows:
        if row.name.startswith("  "):
            continue
        took = spent[int(row.name.split()[0])]
        cpu_us = sum(each.cpu_us for each in took) / commands
        switches = sum(each.switches for each in took) / commands
        row.note = (
            f"a command takes {cpu_us:.1f} us of processor time in all processes together"
            f" and {switches:.1f} context switches"
        )
    return rows


def apart(groups: Sequence[Group], size: Size) -> list[Figure]:
    """Commands a millisecond apart, as an engine's are at most: everybody sleeps in between."""
    samples: Samples = {}
    for _ in range(size.turns):
        for group in groups:
            for name, take in {"ring": Group.ring_us, **APART}.items():
                taken = take(group, size.calls, size.pause_us)
                samples.setdefault((group.ranks, name), []).extend(taken)
    return _rows(groups, samples, list(APART), bar_at=8)
