"""Findings about an instance: its memory use, waiting requests and failing tiers.

    for finding in explain(status, ledger): print(finding.about, finding.what, finding.do)

`status` is the status of the instance, `ledger` the ledger of its device. `kvctl explain` shows
every finding; `kvctl doctor` shows the problems of every instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvelastic.doctor.finding import Finding, Outcome, State, check, line, problem, warning
from kvelastic.doctor.judge_ledger import explain_ledger, has_memory_for
from kvelastic.units import format_limit, format_pages, format_size, size_argument, whole_pages

if TYPE_CHECKING:
    from kvelastic.doctor.facts import Facts
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.shared.ledger_facts import LedgerInfo
    from kvelastic.shared.link_status import NodeStatus
    from kvelastic.shared.tier_status import TiersStatus, TierStatus

_PATIENCE_S: Final = 1.0
"""Seconds after which a request counts as late. Instances normally respond in about 1 ms."""
_MUCH_SLACK: Final = 0.25
"""Fraction of the mapped memory."""
_LEAST_MAPPING_BYTES: Final = 2 << 20
_LEAST_BLOCKS_A_PAGE: Final = 8
"""Lower bounds of a page's mapping size: bytes, and blocks (see `KVELASTIC_PAGE_SIZE_MB`)."""


def explain(
    status: InstanceStatus, ledger: LedgerInfo | None, nodes: Sequence[NodeStatus] = ()
) -> list[Finding]:
    """Return the findings about an instance, in reading order.

    `nodes` are the nodes of its process, whose peers may have memory held for them.
    """
    if status.life == "dead":
        return [line("state", *ended(status.pid, is_ours=False)[1:])]
    return [
        *_life(status),
        *_holdings(status),
        *_held_for_peers(nodes),
        *_request(status),
        *explain_waiting(status),
        *(_sleep(status) if status.asleep else _limit(status, ledger)),
        *_setter(status),
        *_engine(status),
        *explain_ledger(status, ledger),
        *explain_tiers(status.shown_tiers),
    ]


def _held_for_peers(nodes: Sequence[NodeStatus]) -> Iterable[Finding]:
    for node in nodes:
        if node.holds_in_words:
            yield line(
                "held",
                node.holds_in_words,
                "set a shorter KVELASTIC_PREFILL_HOLD_SECONDS if decode engines do not read them",
            )


def _life(status: InstanceStatus) -> Iterable[Finding]:
    if status.life == "closing":
        yield line("state", "It is stopping and accepts no new requests.")
    elif status.life == "unknown":
        yield line("state", *unknown(status.name)[1:])


def ended(pid: int, *, is_ours: bool) -> Outcome:
    """Return the finding for a segment whose instance is dead."""
    return Outcome(
        "warning" if is_ours else "note",
        f"Its process {pid} has ended; its memory is released.",
        "kvctl gc" if is_ours else "run kvctl gc as its owner or as root",
    )


def unknown(name: str) -> Outcome:
    """Return the finding for a segment whose process's liveness cannot be checked."""
    return warning(
        "Its liveness is unknown: liveness locks do not work on the file system of its segment."
        " The segment is never removed.",
        "mount a tmpfs at /dev/shm; if its process has ended (kvctl list shows its pid inside its"
        f" container), run kvctl delete {name} --force",
    )


def _holdings(status: InstanceStatus) -> Iterable[Finding]:
    whose = "its devices'" if len(status.uses) > 1 else "the device's"
    of_device = f" of {whose} {format_size(status.capacity_bytes)}" if status.capacity_bytes else ""
    if status.mapped_bytes == 0:
        yield line("holds", f"It holds no memory{of_device}.")
        return
    yield line("holds", f"It holds {format_size(status.mapped_bytes)}{of_device}.")
    if len(status.uses) > 1:
        parts = [f"{format_size(use.mapped_bytes)} on {use.device}" for use in status.uses]
        yield line(
            "devices",
            f"Of that {', '.join(parts)}: every page has a copy for each rank; a page needs memory"
            " on all these devices.",
        )
    if status.in_use_bytes:
        yield line(
            "in use",
            f"{_part(status, status.in_use_bytes)} are in blocks in use; they are freed when"
            " their requests end or are preempted.",
        )
    if status.set_aside_bytes:
        yield line(
            "set aside",
            f"{_part(status, status.set_aside_bytes)} are in blocks that the engine set aside for"
            " later requests; they are released under memory pressure.",
        )
    if status.cached_bytes:
        yield line(
            "cached",
            f"{_part(status, status.cached_bytes)} are in cached blocks, kept for prompts with"
            " the same prefix; they are evicted when memory is needed.",
            "lower the limit to evict them, or set KVELASTIC_CACHE_IDLE_SECONDS to evict idle ones",
        )
    if status.parked_bytes:
        yield line(
            "parked",
            f"{_part(status, status.parked_bytes)} are in parked pages: free, but kept mapped for"
            " reuse.",
            f"run kvctl trim {status.name} to release them now",
        )
    if status.slack_bytes:
        is_much = status.slack_bytes > _MUCH_SLACK * status.mapped_bytes
        yield line(
            "slack",
            f"{_part(status, status.slack_bytes)} are slack: free blocks in pages that also hold"
            " other blocks (or the null block), and padding.",
            "restart it with a smaller KVELASTIC_PAGE_SIZE_MB to reduce slack"
            if is_much and _can_have_smaller_pages(status)
            else "",
        )


def _can_have_smaller_pages(status: InstanceStatus) -> bool:
    """Return whether pages of half the size are possible; False if not known."""
    blocks = status.blocks_in_use + status.blocks_cached
    if not blocks or not status.mappings_per_page:
        return False
    mapping_bytes = status.page_bytes // status.mappings_per_page
    block_bytes = (status.in_use_bytes + status.cached_bytes) // blocks // status.mappings_per_page
    return mapping_bytes >= 2 * max(_LEAST_MAPPING_BYTES, _LEAST_BLOCKS_A_PAGE * block_bytes)


def _request(status: InstanceStatus) -> Iterable[Finding]:
    if status.request_state == "pending":
        limit = status.requested_limit_bytes
        of_what = "" if limit is None else f" (limit {format_size(limit)})"
        is_late = status.pending_s > _PATIENCE_S and status.life == "alive"
        yield line(
            "request",
            f"The newest request{of_what} was made {status.pending_s:.1f} s ago; no reply yet.",
            f"check whether its process {status.pid} is stopped or hangs" if is_late else "",
            is_blocked=True,
        )
    elif status.request_state == "failed":
        yield line(
            "failed",
            f"Its memory has failed: {status.reason}. It allocates no more blocks.",
            "restart the engine",
            is_blocked=True,
        )
    elif status.request_state == "refused":
        yield line(
            "request",
            f"The newest request was refused: {status.reason}. The previous values still apply.",
            "correct the request and repeat it with kvctl set",
            is_blocked=True,
        )


def explain_waiting(status: InstanceStatus) -> Iterable[Finding]:
    """Report how many requests wait, what the first needs, what is allowed, and what helps."""
    count = status.requests_waiting
    if not count:
        return
    state: State = "note"
    requests = "1 request waits" if count == 1 else f"{count} requests wait"
    needs_bytes, page_bytes, do = status.first_needs_bytes, status.page_bytes, ""
    needs = f"The first needs {format_pages(needs_bytes, page_bytes)}"
    device_bytes = whole_pages(status.capacity_bytes, page_bytes)
    if status.asleep:
        what, do = f"{requests} until the instance wakes.", f"kvctl wake {status.name}"
    elif not needs_bytes:
        what = f"{requests} for memory until running requests end."
    elif not status.is_limit_too_low:
        what = (
            f"{requests} for memory. {needs}, which its limit allows: it runs when other requests"
            " end or other instances release memory."
        )
    elif needs_bytes > device_bytes:
        state = "problem"
        what = (
            f"{requests} for memory. {needs}, but the capacity of the device is"
            f" {format_size(status.capacity_bytes)}: raising the limit does not help."
        )
        do = (
            f"run kvctl capacity {status.device} SIZE with {size_argument(needs_bytes)} or more if"
            " the machine has that much memory, or shorten the prompt"
        )
    else:
        state = "problem"
        allowed = format_pages(status.allowed_bytes, page_bytes)
        may_bytes = min(status.first_may_need_bytes, device_bytes)
        what = (
            f"{requests} for memory. {needs}, but its limit allows {allowed}: it waits until the"
            " limit is raised."
        )
        if may_bytes > needs_bytes:
            what += f" With its maximum output it needs {format_size(may_bytes)}."
        do = f"kvctl limit {status.name} {size_argument(max(needs_bytes, may_bytes))}"
    yield line("waiting", what, do, is_blocked=True, state=state)


def _sleep(status: InstanceStatus) -> Iterable[Finding]:
    """Report that the instance sleeps, and the limit that applies when it wakes."""
    held, wake = format_size(status.mapped_bytes), f"kvctl wake {status.name}"
    if status.mapped_bytes:
        what = (
            f"It is going to sleep: it allocates no blocks, and releases the remaining {held} when"
            " running requests end."
        )
        do = f"wait, or run {wake}"
    else:
        what = "It is asleep: it allocates no blocks, and new requests wait until it wakes."
        do = f"run {wake}; if the controller put it to sleep, send a request for its model instead"
    if status.engine_asleep:
        do = f"wake its engine, which also wakes the instance; {wake} alone is not enough"
    elif status.engine_asleep is False:
        what += " Its engine is awake and still accepts requests."
        do = wake
    yield line("asleep", what, do, is_blocked=True)
    limit = format_limit(status.limit_bytes, status.page_bytes)
    yield line("limit", f"Its limit is {limit} when it wakes.")


def _engine(status: InstanceStatus) -> Iterable[Finding]:
    """Report a sleeping engine; requests to the instance cannot wake it."""
    if not status.engine_asleep:
        return
    also = "is asleep too" if status.asleep else "is asleep, but the instance is awake"
    yield line(
        "engine",
        f"Its engine {also}: requests wait until the engine wakes.",
        "wake it through the controller (POST /action/wakeup/MODEL, or a request for its model);"
        " without a controller, send POST /wake_up to vLLM",
        is_blocked=True,
    )


def _limit(status: InstanceStatus, ledger: LedgerInfo | None) -> Iterable[Finding]:
    limit = _limit_text(status)
    if status.is_squeezed:
        yield line(
            "limit",
            f"Its limit is {format_limit(status.limit_bytes, status.page_bytes)}; memory pressure"
            f" lowers it to {limit}, because other instances need memory or the machine is short"
            " of it.",
            f"run kvctl set {status.name} --min SIZE or a higher --priority to let it keep more"
            " than others; run kvctl doctor if the machine is short of memory",
        )
    if status.over_bytes:
        yield _over(status)
        return
    if 0 < status.capacity_bytes < status.page_bytes:
        page = size_argument(status.page_bytes)
        yield line(
            "limit",
            f"The capacity of its device, {format_size(status.capacity_bytes)}, is less than one"
            f" page of {format_size(status.page_bytes)}: it allocates no blocks.",
            f"run kvctl capacity {status.device} SIZE with {page} or more",
            is_blocked=True,
        )
        return
    is_whole = 0 < status.capacity_bytes < status.effective_limit_bytes + status.page_bytes
    if status.room_bytes >= max(1, status.page_bytes):
        room = f"{format_size(status.room_bytes)} more can be mapped"
        whole = " (the whole device)" if is_whole else ""
        if status.is_limited:
            yield line("limit", f"Its limit is {limit}{whole}: {room}.")
        else:
            of_what = "of the device" if is_whole else "of its reserved address space"
            yield line("limit", f"It has no limit: {room} within the {limit} {of_what}.")
        return
    # A larger limit helps only if the limit is binding and the device has memory to give.
    can_grow = status.is_limit_binding and not status.is_squeezed and not is_whole
    can_grow = can_grow and has_memory_for(status, ledger)
    if status.spare_bytes:
        yield line(
            "limit",
            f"Its limit of {limit} is reached: new blocks replace"
            f" {format_size(status.spare_bytes)} of parked, set aside or cached memory.",
            f"run kvctl limit {status.name} SIZE with a larger size to cache more"
            if can_grow
            else "",
        )
    elif status.blocks_available:
        count = _blocks(status.blocks_available)
        yield line("limit", f"Its limit of {limit} is reached; {count} can still be allocated.")
    else:
        yield line(
            "limit",
            f"Its limit of {limit} is reached, and no memory is parked, set aside or cached: new"
            " requests wait until blocks are freed.",
            f"run kvctl limit {status.name} SIZE with a larger size" if can_grow else "",
            is_blocked=True,
        )


def _setter(status: InstanceStatus) -> Iterable[Finding]:
    if status.is_limit_of_kvcached_client:
        yield line(
            "set by", f"A kvcached client set the limit through /dev/shm/{status.kvcached_name}."
        )


def _over(status: InstanceStatus) -> Finding:
    over, limit = format_size(status.over_bytes), _limit_text(status)
    over += f" over {'the lowered limit' if status.is_squeezed else f'its limit of {limit}'}"
    spare_bytes = status.spare_bytes
    if status.over_bytes > spare_bytes:
        spare = f"only {format_size(spare_bytes)} of it is" if spare_bytes else "none of it is"
        what = (
            f"It is {over}, and {spare} parked or cached. The rest is in"
            " use: it allocates no blocks until requests end or are preempted."
        )
        do = "wait"
        if status.is_limit_binding and not status.is_squeezed:
            do += f", or run kvctl limit {status.name} SIZE with a larger size"
    else:
        what = (
            f"It is {over}, and releases parked pages and cached blocks. Cached blocks that share a"
            " page with blocks in use are released when these are freed."
        )
        do = "run kvctl explain again; if nothing changes, wait until requests end"
    return line("limit", what, do, is_blocked=True)


def _limit_text(status: InstanceStatus) -> str:
    """Return the limit in force: its own with whole pages, or a lower one under memory pressure."""
    if status.is_limit_binding and not status.is_squeezed:
        return format_limit(status.limit_bytes, status.page_bytes)
    return format_size(status.effective_limit_bytes)


def _part(status: InstanceStatus, size_bytes: int) -> str:
    return f"{format_size(size_bytes)} ({100 * size_bytes / status.mapped_bytes:.0f}%)"


def explain_tiers(shown: TiersStatus | None) -> Iterable[Finding]:
    """Report what tiers hold, what happened to evicted blocks, and which tiers fail."""
    if shown is None or not shown.tiers:
        return
    blocks = shown.blocks
    what = f"Tiers store {', '.join(map(_kept, shown.tiers))}."
    if evicted := blocks.demoted + blocks.dropped:
        what += f" Evicted blocks: {evicted}, of which {blocks.demoted} have a copy in a tier."
    if blocks.matched + blocks.unmatched:
        # Without the lookups: one prompt may look for a block many times before it is loaded.
        what += f" Since the start, requests loaded {_blocks(blocks.loaded)} from tiers"
        what += f" and computed {blocks.missed} that could not be loaded." if blocks.missed else "."
    many_dropped = blocks.dropped > blocks.demoted
    do = "see docs/tiers.md for why blocks are dropped without a copy" if many_dropped else ""
    yield line("tiers", what, do)
    for tier in shown.tiers:
        failed = f"{tier.errors} call{'' if tier.errors == 1 else 's'} to it failed"
        if tier.state == "failing":
            what = f"{tier.tier} is failing: {tier.problem}. {failed}."
            do = f"repair the medium of {tier.tier}; kvelastic retries it within a minute"
            yield line("tiers", what, do, state="problem")
        elif tier.state != "ok":
            what = f"{tier.tier} does not respond; kvelastic bypasses it until it does. {failed}."
            yield line("tiers", what, f"check the medium of {tier.tier}", state="problem")
        elif tier.write_left_bytes == 0:
            yield line(
                "tiers",
                f"{tier.tier} has used its daily write budget; it stores no more blocks until"
                " midnight UTC.",
                "raise KVELASTIC_TIER_DAILY_WRITE if faster wear of the medium is acceptable",
            )


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"


def _kept(tier: TierStatus) -> str:
    limit = "" if tier.limit_bytes is None else f" of {format_size(tier.limit_bytes)}"
    return f"{_blocks(tier.records)} on {tier.tier} ({format_size(tier.used_bytes)}{limit})"


def _problems(facts: Facts, of: str) -> Iterator[Outcome]:
    for status in facts.instances:
        for finding in (*explain_waiting(status), *explain_tiers(status.shown_tiers)):
            if finding.about == of and finding.state == "problem":
                yield problem(f"{status.name}: {finding.what}", finding.do)


@check("instances.waiting", fine="no request needs more memory than its limit allows")
def _waiting(facts: Facts) -> Iterator[Outcome]:
    return _problems(facts, "waiting")


@check("instances.tiers", fine="no tier is failing")
def _tiers(facts: Facts) -> Iterator[Outcome]:
    return _problems(facts, "tiers")


CHECKS: Final = (_waiting, _tiers)
