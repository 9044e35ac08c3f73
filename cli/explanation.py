"""Why an instance holds what it holds: the judgement, a pure function over plain values.

    for line in explain(status, ledger): say(line.what, line.do)

`status` is the instance's, `ledger` that of its device. Nothing is looked at in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kvelastic.cli.explanation_ledger import explain_ledger, has_memory_for
from kvelastic.cli.explanation_line import Line
from kvelastic.instance.trouble import waiting_trouble
from kvelastic.sizes import format_limit, format_size

if TYPE_CHECKING:
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.ledger_facts import LedgerInfo

_PATIENCE_S: Final = 1.0
"""An instance answers in about a millisecond; after so long something is wrong with it."""
_MUCH_SLACK: Final = 0.25
"""Part of what is mapped."""
_LEAST_MAPPING_BYTES: Final = 2 << 20
_LEAST_BLOCKS_A_PAGE: Final = 8
"""No mapping of a page is smaller than either (see `KVELASTIC_PAGE_SIZE_MB`)."""


def explain(status: InstanceStatus, ledger: LedgerInfo | None) -> list[Line]:
    """What there is to say of an instance, in the order in which it is to be read."""
    if status.life == "dead":
        return [
            Line(
                "state",
                f"Its process {status.pid} has ended, and all that it held is free.",
                "kvctl gc, run by the user whose it was, removes its segment",
            )
        ]
    return [
        *_life(status),
        *_holdings(status),
        *_request(status),
        *_waiting(status),
        *(_sleep(status) if status.asleep else _limit(status, ledger)),
        *_engine(status),
        *explain_ledger(status, ledger),
    ]


def _life(status: InstanceStatus) -> Iterable[Line]:
    if status.life == "closing":
        yield Line("state", "It is ending, and takes no more requests.")
    elif status.life == "unknown":
        yield Line(
            "state",
            "Whether its process lives cannot be asked here: the file system of its segment has no"
            " locks for it.",
            "mount a tmpfs at /dev/shm; kvctl doctor says more",
        )


def _holdings(status: InstanceStatus) -> Iterable[Line]:
    whose = "its devices'" if len(status.uses) > 1 else "the device's"
    of_device = f" of {whose} {_size(status.capacity_bytes)}" if status.capacity_bytes else ""
    if status.mapped_bytes == 0:
        yield Line("holds", f"It holds no memory{of_device}.")
        return
    yield Line("holds", f"It holds {_size(status.mapped_bytes)}{of_device}.")
    if len(status.uses) > 1:
        parts = [f"{_size(use.mapped_bytes)} on {use.device}" for use in status.uses]
        yield Line(
            "devices",
            f"Of that {', '.join(parts)}: every page has a copy for each rank, and none comes where"
            " one device has no room.",
        )
    if status.in_use_bytes:
        yield Line(
            "in use",
            f"{_part(status, status.in_use_bytes)} are in blocks that requests use; they come free"
            " when those end or are preempted.",
        )
    if status.set_aside_bytes:
        yield Line(
            "set aside",
            f"{_part(status, status.set_aside_bytes)} are in blocks that the engine set aside for"
            " requests to come. They go when memory is needed.",
        )
    if status.cached_bytes:
        yield Line(
            "cached",
            f"{_part(status, status.cached_bytes)} are in cached blocks: no request uses them, and"
            " their contents are worth keeping. They go when memory is needed.",
            "nothing; a lower limit evicts them, KVELASTIC_CACHE_IDLE_SECONDS evicts idle ones",
        )
    if status.parked_bytes:
        yield Line(
            "parked",
            f"{_part(status, status.parked_bytes)} are in parked pages: free, and kept mapped for"
            " the next use.",
            f"nothing; kvctl trim {status.name} gives them back now",
        )
    if status.slack_bytes:
        is_much = status.slack_bytes > _MUCH_SLACK * status.mapped_bytes
        yield Line(
            "slack",
            f"{_part(status, status.slack_bytes)} are slack: free blocks on pages that others are"
            " used on, and padding.",
            "a smaller KVELASTIC_PAGE_SIZE_MB, at its next start, makes that less"
            if is_much and _can_have_smaller_pages(status)
            else "",
        )


def _can_have_smaller_pages(status: InstanceStatus) -> bool:
    """Whether a page of half the size can be had; False where that is not known."""
    blocks = status.blocks_in_use + status.blocks_cached
    if not blocks or not status.mappings_per_page:
        return False
    mapping_bytes = status.page_bytes // status.mappings_per_page
    block_bytes = (status.in_use_bytes + status.cached_bytes) // blocks // status.mappings_per_page
    return mapping_bytes >= 2 * max(_LEAST_MAPPING_BYTES, _LEAST_BLOCKS_A_PAGE * block_bytes)


def _request(status: InstanceStatus) -> Iterable[Line]:
    if status.request_state == "pending":
        limit = status.requested_limit_bytes
        of_what = "" if limit is None else f" (limit {_size(limit)})"
        is_late = status.pending_s > _PATIENCE_S and status.life == "alive"
        yield Line(
            "request",
            f"The newest request{of_what} was made {status.pending_s:.1f} s ago; no reply yet.",
            f"see whether its process {status.pid} is stopped or hangs" if is_late else "",
            is_blocked=True,
        )
    elif status.request_state == "failed":
        yield Line(
            "failed",
            f"The memory behind it has failed: {status.reason}. It hands out no block any more.",
            "restart the engine",
            is_blocked=True,
        )
    elif status.request_state == "refused":
        yield Line(
            "request",
            f"The newest request is refused: {status.reason}. What was in force before still is.",
            "ask for something that it can do, with kvctl set",
            is_blocked=True,
        )


def _waiting(status: InstanceStatus) -> Iterable[Line]:
    trouble = waiting_trouble(status)
    if trouble is not None:
        yield Line("waiting", trouble.what, trouble.do, is_blocked=True)


def _sleep(status: InstanceStatus) -> Iterable[Line]:
    """Of one that sleeps; its limit matters when it wakes."""
    held, wake = _size(status.mapped_bytes), f"kvctl wake {status.name}"
    if status.mapped_bytes:
        what = (
            f"It was put to sleep: it hands out no blocks, and the {held} that it holds still go"
            " when the requests that use them end."
        )
        do = f"wait, or {wake}"
    else:
        what = "It is asleep: it hands out no blocks, so new requests wait until it is woken."
        do = f"{wake}; where the controller put it to sleep, a request for its model wakes it"
    if status.engine_asleep:
        do = f"wake its engine, which wakes it too; {wake} alone is not enough"
    elif status.engine_asleep is False:
        what += " Its engine is awake and takes requests all the same."
        do = wake
    yield Line("asleep", what, do, is_blocked=True)
    limit = format_limit(status.limit_bytes, status.page_bytes)
    yield Line("limit", f"Its limit is {limit} when it wakes.")


def _engine(status: InstanceStatus) -> Iterable[Line]:
    """Of an engine that sleeps, which no request to the instance changes."""
    if not status.engine_asleep:
        return
    also = "sleeps, too" if status.asleep else "sleeps, though its memory is awake"
    yield Line(
        "engine",
        f"Its engine {also}: requests to it wait until the engine is woken.",
        "have the controller wake it (POST /action/wakeup/MODEL, or a request for its model); an"
        " engine without a controller by itself, vLLM with POST /wake_up",
        is_blocked=True,
    )


def _limit(status: InstanceStatus, ledger: LedgerInfo | None) -> Iterable[Line]:
    limit = _limit_text(status)
    if status.is_squeezed:
        yield Line(
            "limit",
            f"Its limit is {format_limit(status.limit_bytes, status.page_bytes)}; it keeps to"
            f" {limit} for now, because others are owed memory that it holds, or because the"
            " machine has too little left.",
            f"kvctl set {status.name} --min SIZE or a higher --priority, if it should keep more"
            " than others; kvctl doctor, if the machine is short of memory",
        )
    if status.over_bytes:
        yield _over(status)
        return
    is_whole = 0 < status.capacity_bytes < status.effective_limit_bytes + status.page_bytes
    if status.room_bytes >= max(1, status.page_bytes):
        whole = ", which is the whole device" if is_whole else ""
        yield Line("limit", f"Its limit is {limit}{whole}: {_size(status.room_bytes)} more fit.")
        return
    # A larger limit helps where it is the limit that binds, and the device has something to give.
    can_grow = status.is_limit_binding and not status.is_squeezed and not is_whole
    can_grow = can_grow and has_memory_for(status, ledger)
    if status.spare_bytes:
        yield Line(
            "limit",
            f"Its limit of {limit} is reached: new blocks take the place of the"
            f" {_size(status.spare_bytes)} that are parked, set aside or cached.",
            f"kvctl limit {status.name} SIZE, if it should cache more" if can_grow else "",
        )
    elif status.blocks_available:
        count = f"{status.blocks_available} block{'' if status.blocks_available == 1 else 's'}"
        yield Line("limit", f"Its limit of {limit} is reached; {count} can still be had.")
    else:
        yield Line(
            "limit",
            f"Its limit of {limit} is reached, and nothing is parked, set aside or cached: new"
            " requests wait until blocks come free.",
            f"kvctl limit {status.name} SIZE, with a larger one" if can_grow else "",
            is_blocked=True,
        )


def _over(status: InstanceStatus) -> Line:
    over, limit = _size(status.over_bytes), _limit_text(status)
    over += f" over {'that' if status.is_squeezed else f'its limit of {limit}'}"
    spare_bytes = status.spare_bytes
    if status.over_bytes > spare_bytes:
        spare = f"only {_size(spare_bytes)} of it are" if spare_bytes else "nothing of it is"
        what = (
            f"It is {over}, and {spare} parked or cached: the rest is in"
            " use, so it hands out no blocks until requests end or are preempted."
        )
        do = "wait"
        if status.is_limit_binding and not status.is_squeezed:
            do += f", or raise the limit: kvctl limit {status.name} SIZE"
    else:
        what = (
            f"It is {over}, and gives parked pages and cached blocks"
            " back; cached blocks on pages that are in use too come free only with those."
        )
        do = "look again; if it stays so, wait for requests to end"
    return Line("limit", what, do, is_blocked=True)


def _limit_text(status: InstanceStatus) -> str:
    """What it keeps to now: its limit, with its whole pages, or what a squeeze leaves of it."""
    if status.is_limit_binding and not status.is_squeezed:
        return format_limit(status.limit_bytes, status.page_bytes)
    return _size(status.effective_limit_bytes)


def _part(status: InstanceStatus, size_bytes: int) -> str:
    return f"{_size(size_bytes)} ({100 * size_bytes / status.mapped_bytes:.0f}%)"


def _size(size_bytes: int) -> str:
    return format_size(size_bytes)
