"""Decides which model's turn it is: a pure function of waiting models and memory holders.

    decision = decide(admission, models, wants)

Waiting models are served by rank, and in order of arrival within a rank. No model overtakes: for
later ones, the need of an earlier one is already used, and the models it displaces are gone. So an
earlier one waits only for models that already hold memory:

    wants        it fits        -> go
    in order     idle ones go   -> they are put to sleep; next time it fits
                 busy ones      -> once their `min_awake` is over their new requests wait (they
                                   *yield*), until they are idle
                 it never fits  -> refused, naming the holders of the memory
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvelastic.controller.models.admission import Admission, Model, Stand

SPARED_PART: Final = 0.75
"""As a part of `min_awake`: how long a model that has made room spares models in use. Of nine
values tried it had the shortest waits on 36 traces of bursts (see test_swap_bursts.py).
"""


@dataclass(frozen=True)
class Want:
    """A model that waits for its turn."""

    name: str
    number: int
    """Order of arrival; within a rank the lower goes first."""
    priority: int = 0
    """The highest priority of its waiting requests."""
    may_displace: bool = True
    """Others may be put to sleep for it; otherwise it goes only if there is room."""
    is_start: bool = False
    """Its turn starts a process."""
    spares_s: float = 0.0
    """For this time it displaces no model in use, because it has just made room itself. Without it,
    two models that displace each other's neighbours do so at the same time, and then wait for the
    same `min_awake`. Spacing them shortens the longest wait by a quarter."""


@dataclass(frozen=True)
class Wait:
    """Why a model waits."""

    why: str
    """The reason, as text."""
    leavers: tuple[str, ...] = ()
    """The models that must make room for it."""


@dataclass
class Decision:
    """The actions to take now."""

    go: list[str] = field(default_factory=list)
    """Models whose turn it is."""
    sleep: list[str] = field(default_factory=list)
    """Models to put to sleep."""
    yielding: set[str] = field(default_factory=set)
    """Awake models whose new requests must wait. All other models' requests do not."""
    refused: dict[str, str] = field(default_factory=dict)
    """Models that cannot get room in this situation, with the reason."""
    waits: dict[str, Wait] = field(default_factory=dict)
    look_again_in_s: float | None = None
    """Seconds until a `min_awake` ends."""


def rank(want: Want, model: Model) -> tuple[int, int, int]:
    """Sort key, lowest first: requests' priority, the model's priority, order of arrival."""
    return -want.priority, -model.priority, want.number


def decide(
    admission: Admission,
    models: Mapping[str, Model],
    wants: Iterable[Want],
    starts_at_once: int = 0,
) -> Decision:
    """Decide on all waiting models. `starts_at_once`: limit of concurrent starts; 0: no limit."""
    decision = Decision()
    held = {name: one for name, one in models.items() if one.stand is not Stand.AWAY}
    kept = {name: one for name, one in held.items() if one.stand is not Stand.GOING}
    """The models that remain once all sleeps and wakes in progress have ended."""
    starting = sum(one.is_starting and one.stand is Stand.COMING for one in models.values())
    ordered = sorted(wants, key=lambda want: rank(want, models[want.name]))
    for want in ordered:
        coming = models[want.name]
        present = [_spared(model, want) for model in kept.values()]
        leavers = admission.leavers(coming, present)
        if leavers is None or (leavers and not want.may_displace):
            decision.refused[want.name] = admission.explain(coming, present)
            continue
        for model in leavers:
            del kept[model.name]
        # A later model of this pass must not displace it as if it were idle.
        kept[want.name] = replace(coming, is_busy=True)
        if not leavers:
            in_the_way = admission.obstacle(coming, held.values())
            if in_the_way is not None:
                going = [n for n, one in models.items() if one.stand is Stand.GOING]
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
        _hold_back(decision, leavers, coming)
    return decision


def _spared(model: Model, want: Want) -> Model:
    if want.spares_s <= model.stays_s or not model.is_in_use:
        return model
    return replace(model, stays_s=want.spares_s)


def _hold_back(decision: Decision, leavers: Sequence[Model], coming: Model) -> None:
    """Hold back busy models whose `min_awake` is over; look again when the next one ends."""
    for model in leavers:
        if model.stand is not Stand.THERE:
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
