"""Whose turn it is: a pure function over what waits for room and what holds it.

    decision = decide(room, standings, wants)

Those who wait are served in the order of their rank, and of equals in the order in which they came.
Nobody overtakes: what an earlier one needs counts as taken for the later ones, and whom it has
displaced is displaced for it. So an earlier one waits for those only who hold memory already:

    wants        it fits        -> go
    in order     idle ones go   -> they are put to sleep; next time it fits
                 busy ones      -> once their `min_awake` is over their new requests wait (they
                                   *yield*), until they are idle
                 it never fits  -> refused, with who holds the memory
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from kvelastic.controller.room import Model, Room

SPARED_PART: Final = 0.75
"""Of `min_awake`: so long whoever has made room spares those who are in use. Of nine parts that
were tried it had the shortest waits on 36 traces of bursts (test_turns_bursts.py makes such).
"""


class Stand(Enum):
    """How a model stands towards memory."""

    AWAY = "away"
    """It holds none: asleep, stopped, or it waits for its turn."""
    COMING = "coming"
    """It has had its turn, and wakes or starts."""
    THERE = "there"
    GOING = "going"
    """It falls asleep or stops, and still holds what it held."""


@dataclass(frozen=True)
class Standing:
    """One model, and how it stands."""

    model: Model
    stand: Stand
    is_starting: bool = False
    """A process is started for it: of these only so many run at once."""


@dataclass(frozen=True)
class Want:
    """A model that waits for its turn."""

    name: str
    number: int
    """Counts wants; of equal rank the lower goes first."""
    priority: int = 0
    """The highest of the requests that wait for it."""
    may_displace: bool = True
    """Others are put to sleep for it. Else it goes only where there is room."""
    is_start: bool = False
    """Its turn starts a process."""
    spares_s: float = 0.0
    """So long yet it displaces nobody who is in use: it has just made room itself. Else two that
    displace each other's neighbours do it at the same time, and then wait for the same `min_awake`;
    spaced evenly, the longest wait is shorter by a quarter."""


@dataclass(frozen=True)
class Wait:
    """Why somebody waits."""

    why: str
    """For people."""
    leavers: tuple[str, ...] = ()
    """Who is to make room for it."""


@dataclass
class Decision:
    """What is to be done now."""

    go: list[str] = field(default_factory=list)
    """It is their turn."""
    sleep: list[str] = field(default_factory=list)
    """To be put to sleep."""
    yielding: set[str] = field(default_factory=set)
    """Awake ones whose new requests wait. Everybody else's do not."""
    refused: dict[str, str] = field(default_factory=dict)
    """Who never gets room as things are, and why."""
    waits: dict[str, Wait] = field(default_factory=dict)
    look_again_in_s: float | None = None
    """A `min_awake` ends then."""


def rank(want: Want, model: Model) -> tuple[int, int, int]:
    """The lowest goes first: by requests' priority, the model's own, and the order of coming."""
    return -want.priority, -model.priority, want.number


def decide(
    room: Room, standings: Mapping[str, Standing], wants: Iterable[Want], starts_at_once: int = 0
) -> Decision:
    """See the module. `starts_at_once`: processes that start at the same time; 0: any number."""
    decision = Decision()
    held = {name: one.model for name, one in standings.items() if one.stand is not Stand.AWAY}
    kept = {name: m for name, m in held.items() if standings[name].stand is not Stand.GOING}
    """What is left when everybody has gone and come who is about to."""
    starting = sum(one.is_starting and one.stand is Stand.COMING for one in standings.values())
    ordered = sorted(wants, key=lambda want: rank(want, standings[want.name].model))
    for want in ordered:
        coming = standings[want.name].model
        present = [_spared(model, want) for model in kept.values()]
        leavers = room.leavers(coming, present)
        if leavers is None or (leavers and not want.may_displace):
            decision.refused[want.name] = room.explain(coming, present)
            continue
        for model in leavers:
            del kept[model.name]
        # Not to be displaced by a later one of this moment as if it were idle.
        kept[want.name] = replace(coming, is_busy=True)
        if not leavers:
            in_the_way = room.obstacle(coming, held.values())
            if in_the_way is not None:
                going = [n for n, one in standings.items() if one.stand is Stand.GOING]
                decision.waits[want.name] = Wait("others still fall asleep", tuple(going))
            elif want.is_start and starts_at_once and starting >= starts_at_once:
                decision.waits[want.name] = Wait(f"{starting} engines are starting already")
            else:
                decision.go.append(want.name)
                held[want.name] = coming
                starting += want.is_start
            continue
        names = tuple(model.name for model in leavers)
        if all(model.may_leave_now for model in leavers):
            decision.sleep += names
            decision.waits[want.name] = Wait("others fall asleep for it", names)
            continue
        decision.waits[want.name] = Wait(_why(leavers, coming), names)
        _hold_back(decision, leavers, coming, standings)
    return decision


def _spared(model: Model, want: Want) -> Model:
    if want.spares_s <= model.stays_s or not model.is_in_use:
        return model
    return replace(model, stays_s=want.spares_s)


def _hold_back(
    decision: Decision,
    leavers: Sequence[Model],
    coming: Model,
    standings: Mapping[str, Standing],
) -> None:
    """Have those end what they do whose `min_awake` is over; look again when the next one's is."""
    for model in leavers:
        if standings[model.name].stand is not Stand.THERE:
            continue
        if model.stays_s > 0:
            before_s = decision.look_again_in_s
            decision.look_again_in_s = min(before_s or model.stays_s, model.stays_s)
        elif model.may_be_held_back_for(coming):
            decision.yielding.add(model.name)


def _why(leavers: Sequence[Model], coming: Model) -> str:
    parts = []
    for model in leavers:
        if model.stays_s > 0:
            parts.append(f"{model.name} is not to make room for another {model.stays_s:.0f} s")
        elif model.is_busy and model.may_be_held_back_for(coming):
            parts.append(f"{model.name} ends its requests first")
        elif model.is_busy:
            parts.append(f"{model.name} is more important and has requests")
    return "; ".join(parts) or "others fall asleep for it"
