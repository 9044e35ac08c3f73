"""Why an instance holds what it holds: the judgement, a pure function over plain values.

    for line in explain(facts, ledger): print(line.what, line.do)

`facts` come from its segment and `ledger` is that of its device. Nothing is looked at in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kvelastic.cli.explanation_facts import InstanceFacts, Line
from kvelastic.cli.explanation_ledger import explain_ledger
from kvelastic.sizes import format_size

if TYPE_CHECKING:
    from kvelastic.ledger_facts import LedgerInfo

_PATIENCE_S: Final = 1.0
"""An instance answers in about a millisecond; after so long something is wrong with it."""
_MUCH_OVERHEAD: Final = 0.25
"""Part of what is mapped."""


def explain(facts: InstanceFacts, ledger: LedgerInfo | None) -> list[Line]:
    """What there is to say of an instance, in the order in which it is to be read."""
    if facts.status == "dead":
        return [
            Line(
                "state",
                f"Its process {facts.pid} has ended, and all that it held is free.",
                "kvctl gc, run by the user whose it was, removes its segment",
            )
        ]
    return [
        *_status(facts),
        *_holdings(facts),
        *_wish(facts),
        *(_sleep(facts) if facts.asleep else _limit(facts)),
        *explain_ledger(facts, ledger),
    ]


def _status(facts: InstanceFacts) -> Iterable[Line]:
    if facts.status == "closing":
        yield Line("state", "It is ending, and answers no wish any more.")
    elif facts.status == "unknown":
        yield Line(
            "state",
            "Whether its process lives cannot be asked here: the file system of its segment has no"
            " locks for it.",
            "mount a tmpfs at /dev/shm; kvctl doctor says more",
        )


def _holdings(facts: InstanceFacts) -> Iterable[Line]:
    of_device = f" of the device's {_size(facts.capacity_bytes)}" if facts.capacity_bytes else ""
    if facts.mapped_bytes == 0:
        yield Line("holds", f"It holds no memory{of_device}.")
        return
    yield Line("holds", f"It holds {_size(facts.mapped_bytes)}{of_device}.")
    if facts.in_use_bytes:
        yield Line(
            "in use",
            f"{_part(facts, facts.in_use_bytes)} are in blocks that requests use; they come free"
            " when those end or are preempted.",
        )
    if facts.reserved_bytes:
        yield Line(
            "reserved",
            f"{_part(facts, facts.reserved_bytes)} are in blocks that the engine set aside for"
            " requests to come. They go when memory is needed.",
        )
    if facts.cached_bytes:
        yield Line(
            "cached",
            f"{_part(facts, facts.cached_bytes)} are in cached blocks: no request uses them, and"
            " their contents are worth keeping. They go when memory is needed.",
            "nothing; a lower limit evicts them, KVELASTIC_MAX_CACHED_TOKENS bounds them",
        )
    if facts.parked_bytes:
        yield Line(
            "parked",
            f"{_part(facts, facts.parked_bytes)} are in parked pages: free, and kept mapped for"
            " the next use.",
            f"nothing; kvctl trim {facts.name} gives them back now",
        )
    if facts.overhead_bytes:
        is_much = facts.overhead_bytes > _MUCH_OVERHEAD * facts.mapped_bytes
        yield Line(
            "overhead",
            f"{_part(facts, facts.overhead_bytes)} are overhead: padding, and free blocks on pages"
            " that others are used on.",
            "a smaller KVELASTIC_PAGE_SIZE_MB, at its next start, makes that less"
            if is_much
            else "",
        )


def _wish(facts: InstanceFacts) -> Iterable[Line]:
    if facts.state == "pending":
        limit = facts.wished_limit_bytes
        of_what = "" if limit is None else f" (limit {_size(limit)})"
        is_late = facts.pending_s > _PATIENCE_S and facts.status == "alive"
        yield Line(
            "wish",
            f"The newest wish{of_what} was written {facts.pending_s:.1f} s ago and is not answered"
            " yet.",
            f"see whether its process {facts.pid} is stopped or hangs" if is_late else "",
            is_blocked=True,
        )
    elif facts.state == "failed":
        yield Line(
            "failed",
            f"The memory behind it has failed: {facts.reason}. It hands out no block any more.",
            "restart the engine",
            is_blocked=True,
        )
    elif facts.state == "refused":
        yield Line(
            "wish",
            f"The newest wish is refused: {facts.reason}. What was in force before still is.",
            "wish for something that it can do, with kvctl set",
            is_blocked=True,
        )


def _sleep(facts: InstanceFacts) -> Iterable[Line]:
    """Of one that sleeps; its limit matters when it wakes."""
    held, wake = _size(facts.mapped_bytes), f"kvctl wake {facts.name}"
    if facts.mapped_bytes:
        what = (
            f"It was put to sleep: it hands out no blocks, and the {held} that it holds still go"
            " when the requests that use them end."
        )
        do = f"wait, or {wake}"
    else:
        what = "It is asleep: it hands out no blocks, so new requests wait until it is woken."
        do = f"{wake}; where the controller put it to sleep, a request for its model wakes it"
    yield Line("asleep", what, do, is_blocked=True)
    if facts.wished_limit_bytes is not None and facts.state in {"applied", "shrinking"}:
        limit = _size(facts.wished_limit_bytes)
        yield Line("limit", f"Its limit is {limit} when it wakes.")


def _limit(facts: InstanceFacts) -> Iterable[Line]:
    limit = _size(facts.limit_bytes)
    if facts.over_bytes:
        yield _over(facts)
        return
    if facts.room_bytes >= max(1, facts.page_bytes):
        is_none = 0 < facts.capacity_bytes <= facts.limit_bytes
        whole = ", which is the whole device" if is_none else ""
        yield Line("limit", f"Its limit is {limit}{whole}: {_size(facts.room_bytes)} more fit.")
        return
    if facts.spare_bytes:
        yield Line(
            "limit",
            f"Its limit of {limit} is reached: new blocks take the place of the"
            f" {_size(facts.spare_bytes)} that are parked, reserved or cached.",
            f"kvctl limit {facts.name} SIZE, if it should cache more",
        )
    else:
        yield Line(
            "limit",
            f"Its limit of {limit} is reached, and nothing is parked, reserved or cached: new"
            " requests wait until blocks come free.",
            f"kvctl limit {facts.name} SIZE, with a larger one",
            is_blocked=True,
        )


def _over(facts: InstanceFacts) -> Line:
    over, limit = _size(facts.over_bytes), _size(facts.limit_bytes)
    spare_bytes = facts.spare_bytes
    if facts.over_bytes > spare_bytes:
        spare = f"only {_size(spare_bytes)} of it are" if spare_bytes else "nothing of it is"
        what = (
            f"It is {over} over its limit of {limit}, and {spare} parked or cached: the rest is in"
            " use, so it hands out no blocks until requests end or are preempted."
        )
        do = f"wait, or raise the limit: kvctl limit {facts.name} SIZE"
    else:
        what = (
            f"It is {over} over its limit of {limit}, and gives parked pages and cached blocks"
            " back; cached blocks on pages that are in use too come free only with those."
        )
        do = "look again; if it stays so, wait for requests to end"
    return Line("limit", what, do, is_blocked=True)


def _part(facts: InstanceFacts, size_bytes: int) -> str:
    return f"{_size(size_bytes)} ({100 * size_bytes / facts.mapped_bytes:.0f}%)"


def _size(size_bytes: int) -> str:
    return format_size(size_bytes)
