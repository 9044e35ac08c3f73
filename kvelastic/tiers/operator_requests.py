"""Runs operators' requests to the tiers: limit, trim, clear, erase and verify.

    answer = carry_out(revision, request, tiers)      # blocks while the stores work

A request comes from a file that other processes write. So it is fully validated here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvelastic.errors import IntegrityError, InvalidArgumentError, KvelasticError
from kvelastic.shared.tier_status import (
    MOST_REASON_BYTES,
    TierAck,
    TierRequest,
    cut_text,
    received,
)
from kvelastic.tiers.base import Selection, Store
from kvelastic.units import format_size

if TYPE_CHECKING:
    from kvelastic.tiers.manager import Tiers

_log = logging.getLogger("kvelastic")

Counts = tuple[int | None, ...]


def labels_of(stores: Sequence[Store]) -> tuple[str, ...]:
    """Return the name of each tier in commands: its kind, with a number from the second on."""
    kinds = [store.name for store in stores]
    return tuple(
        kind if (nth := kinds[: place + 1].count(kind)) == 1 else f"{kind}{nth}"
        for place, kind in enumerate(kinds)
    )


def carry_out(revision: int, request: TierRequest, tiers: Tiers) -> TierAck:
    """Run a request from the status file and return its result. Blocks.

    Does not raise for errors of the request or the stores; it returns them in the result.
    """
    counts: Counts = ()
    try:
        request = received(request)
        state, counts, reason = _CARRIED_OUT[request.kind](request, tiers)
    except InvalidArgumentError as error:
        state, reason = "refused", str(error)
    except IntegrityError as error:
        state, reason = "failed", str(error)
    except KvelasticError as error:
        state, reason = "failed", f"{error.code}: {error}"
    except Exception as error:
        # Report even unexpected errors to the operator, and keep serving requests.
        _log.exception("an operator's request to the tiers failed")
        state, reason = "failed", f"{type(error).__name__}: {error}"
    return TierAck(revision, state, counts, cut_text(reason, MOST_REASON_BYTES))


_Outcome = tuple[str, Counts, str]


def _limit(request: TierRequest, tiers: Tiers) -> _Outcome:
    place = _place_of(request.tier, tiers)
    store = tiers.stores[place]
    if store.capacity().limit_bytes is None:
        raise InvalidArgumentError(f"others decide what {request.tier} holds; it has no limit here")
    least_bytes = store.least_limit_bytes
    if request.size_bytes < least_bytes:
        raise InvalidArgumentError(
            f"{format_size(request.size_bytes)} holds no record; the least that does is"
            f" {least_bytes} bytes, and `trim` empties a tier"
        )
    store.set_limit(request.size_bytes)
    return "done", _held(tiers, place), ""


def _trim(request: TierRequest, tiers: Tiers) -> _Outcome:
    place = _place_of(request.tier, tiers)
    store = tiers.stores[place]
    capacity = store.capacity()
    if capacity.limit_bytes is None:
        raise InvalidArgumentError(
            f"others decide what {request.tier} holds; it cannot be trimmed here"
        )
    if capacity.used_bytes > request.size_bytes and capacity.limit_bytes > request.size_bytes:
        try:
            store.set_limit(request.size_bytes)
        finally:
            store.set_limit(capacity.limit_bytes)
    return "done", _held(tiers, place), ""


def _clear(request: TierRequest, tiers: Tiers) -> _Outcome:
    return _erased(tiers, Selection(namespace=tiers.namespace, every_generation=True))


def _erase(request: TierRequest, tiers: Tiers) -> _Outcome:
    return _erased(tiers, Selection(model=request.model, older_than_s=request.older_than_s))


def _erased(tiers: Tiers, selection: Selection) -> _Outcome:
    erased = tiers.erase(selection)
    labels = labels_of(tiers.stores)
    counts = tuple(erased.get(place) for place in range(len(labels)))
    silent = [label for label, count in zip(labels, counts, strict=True) if count is None]
    if any(not tiers.stores[labels.index(label)].is_ready for label in silent):
        reason = (
            "the weights are being hashed, so its records cannot be told apart; repeat it later"
        )
        return "failed", counts, f"{', '.join(silent)}: {reason}"
    if silent:
        return "failed", counts, f"{', '.join(silent)} did not answer; ask again when it does"
    left = [(label, store.unerased()) for label, store in zip(labels, tiers.stores, strict=True)]
    reasons = [f"{label}: {text}" for label, each in left for text in each if text]
    state = "failed" if any(each.failed for _, each in left) else "done"
    return state, counts, "; ".join(reasons)


def _verify(request: TierRequest, tiers: Tiers) -> _Outcome:
    tiers.check_integrity()
    return "done", tuple(store.capacity().records for store in tiers.stores), ""


def _place_of(label: str, tiers: Tiers) -> int:
    labels = labels_of(tiers.stores)
    if label not in labels:
        raise InvalidArgumentError(f"there is no tier {label!r}; there are {', '.join(labels)}")
    return labels.index(label)


def _held(tiers: Tiers, place: int) -> Counts:
    counts: list[int | None] = [None] * len(tiers.stores)
    counts[place] = tiers.stores[place].capacity().records
    return tuple(counts)


_CARRIED_OUT: dict[str, Callable[[TierRequest, Tiers], _Outcome]] = {
    "limit": _limit,
    "trim": _trim,
    "clear": _clear,
    "erase": _erase,
    "verify": _verify,
}
