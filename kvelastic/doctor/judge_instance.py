"""Findings about an instance: its memory use, waiting requests and failing tiers.

    for finding in explain(status, ledger): print(finding.about, finding.what, finding.do)

`status` is the status of the instance, `ledger` the ledger of its device. `kvctl explain` shows
every finding; `kvctl doctor` shows the problems of every instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from kvelastic.doctor.finding import Finding, Said, State, check, line, problem, warning
from kvelastic.doctor.judge_ledger import explain_ledger, has_memory_for
from kvelastic.sizes import (
    format_limit,
    format_pages,
    format_size,
    size_argument,
    whole_pages,
)

if TYPE_CHECKING:
    from kvelastic.doctor.facts import Facts
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.shared.ledger_facts import LedgerInfo
    from kvelastic.shared.tier_status import TierFigures, TiersFigures

_PATIENCE_S: Final = 1.0
"""Seconds after which a request counts as late. Instances normally respond in about 1 ms."""
_MUCH_SLACK: Final = 0.25
"""Fraction of the mapped memory."""
_LEAST_MAPPING_BYTES: Final = 2 << 20
_LEAST_BLOCKS_A_PAGE: Final = 8
"""Lower bounds of a page's mapping size: bytes, and blocks (see `KVELASTIC_PAGE_SIZE_MB`)."""


def explain(status: InstanceStatus, ledger: LedgerInfo | None) -> list[Finding]:
    """Return the findings about an instance, in reading order."""
    if status.life == "dead":
        return [line("state", *ended(status.pid, is_ours=False)[1:])]
    return [
        *_life(status),
        *_holdings(status),
        *_request(status),
        *explain_waiting(status),
        *(_sleep(status) if status.asleep else _limit(status, ledger)),
        *_setter(status),
        *_engine(status),
        *explain_ledger(status, ledger),
        *explain_tiers(status.shown_tiers),
    ]


def _life(status: InstanceStatus) -> Iterable[Finding]:
    if status.life == "closing":
        yield line("state", "It is ending, and takes no more requests.")
    elif status.life == "unknown":
        yield line("state", *unknown(status.name)[1:])


def ended(pid: int, *, is_ours: bool) -> Said:
    """Return the finding for a segment whose instance is dead."""
    return Said(
        "warning" if is_ours else "note",
        f"Its process {pid} has ended, and all that it held is free.",
        "kvctl gc" if is_ours else "let its owner, or root, run `kvctl gc`",
    )


def unknown(name: str) -> Said:
    """Return the finding for a segment whose process's liveness cannot be checked."""
    return warning(
        "Whether its process lives cannot be asked here: the file system of its segment has no"
        " locks for it. So it is never removed.",
        "mount a tmpfs at /dev/shm; if its process has ended (kvctl list shows the pid as it is in"
        f" its own container), kvctl delete {name} --force",
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
            f"Of that {', '.join(parts)}: every page has a copy for each rank, and none comes where"
            " one device has no room.",
        )
    if status.in_use_bytes:
        yield line(
            "in use",
            f"{_part(status, status.in_use_bytes)} are in blocks that requests use; they are"
            " freed when the requests end or are preempted.",
        )
    if status.set_aside_bytes:
        yield line(
            "set aside",
            f"{_part(status, status.set_aside_bytes)} are in blocks that the engine set aside for"
            " later requests; they are released when memory is needed.",
        )
    if status.cached_bytes:
        yield line(
            "cached",
            f"{_part(status, status.cached_bytes)} are in cached blocks, kept for prompts with"
            " the same prefix; they are evicted when memory is needed.",
            "nothing; a lower limit evicts them, KVELASTIC_CACHE_IDLE_SECONDS evicts idle ones",
        )
    if status.parked_bytes:
        yield line(
            "parked",
            f"{_part(status, status.parked_bytes)} are in parked pages: free, and kept mapped for"
            " the next use.",
            f"nothing; kvctl trim {status.name} releases them now",
        )
    if status.slack_bytes:
        is_much = status.slack_bytes > _MUCH_SLACK * status.mapped_bytes
        yield line(
            "slack",
            f"{_part(status, status.slack_bytes)} are slack: free blocks in pages that also hold"
            " other blocks (the null block too), and padding.",
            "a smaller KVELASTIC_PAGE_SIZE_MB, at its next start, makes that less"
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
            f"see whether its process {status.pid} is stopped or hangs" if is_late else "",
            is_blocked=True,
        )
    elif status.request_state == "failed":
        yield line(
            "failed",
            f"The memory behind it has failed: {status.reason}. It allocates no block any more.",
            "restart the engine",
            is_blocked=True,
        )
    elif status.request_state == "refused":
        yield line(
            "request",
            f"The newest request is refused: {status.reason}. The values before it are in force.",
            "make another request with kvctl set",
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
        what, do = f"{requests} until it is woken.", f"kvctl wake {status.name}"
    elif not needs_bytes:
        what = f"{requests} for memory until requests that run end."
    elif not status.is_limit_too_low:
        what = (
            f"{requests} for memory. {needs}, which its limit allows: it runs when requests end, or"
            " other instances release memory."
        )
    elif needs_bytes > device_bytes:
        state = "problem"
        what = (
            f"{requests} for memory. {needs}, and its device has"
            f" {format_size(status.capacity_bytes)}: no limit lets it run."
        )
        do = (
            f"kvctl capacity {status.device} SIZE with {size_argument(needs_bytes)} or more, if the"
            " machine has it; or have the client shorten the prompt"
        )
    else:
        state = "problem"
        allowed = format_pages(status.allowed_bytes, page_bytes)
        may_bytes = min(status.first_may_need_bytes, device_bytes)
        what = (
            f"{requests} for memory. {needs}, and its limit allows {allowed}: it waits until the"
            " limit is raised."
        )
        if may_bytes > needs_bytes:
            what += f" With the longest answer it needs {format_size(may_bytes)}."
        do = f"kvctl limit {status.name} {size_argument(max(needs_bytes, may_bytes))}"
    yield line("waiting", what, do, is_blocked=True, state=state)


def _sleep(status: InstanceStatus) -> Iterable[Finding]:
    """Report that the instance sleeps, and the limit that applies when it wakes."""
    held, wake = format_size(status.mapped_bytes), f"kvctl wake {status.name}"
    if status.mapped_bytes:
        what = (
            f"It was put to sleep: it allocates no block, and releases the {held} that it still"
            " holds when the requests that use them end."
        )
        do = f"wait, or {wake}"
    else:
        what = "It is asleep: it allocates no block, so new requests wait until it is woken."
        do = f"{wake}; where the controller put it to sleep, a request for its model wakes it"
    if status.engine_asleep:
        do = f"wake its engine, which wakes it too; {wake} alone is not enough"
    elif status.engine_asleep is False:
        what += " Its engine is awake and takes requests all the same."
        do = wake
    yield line("asleep", what, do, is_blocked=True)
    limit = format_limit(status.limit_bytes, status.page_bytes)
    yield line("limit", f"Its limit is {limit} when it wakes.")


def _engine(status: InstanceStatus) -> Iterable[Finding]:
    """Report a sleeping engine; requests to the instance cannot wake it."""
    if not status.engine_asleep:
        return
    also = "sleeps, too" if status.asleep else "sleeps, though its memory is awake"
    yield line(
        "engine",
        f"Its engine {also}: requests to it wait until the engine is woken.",
        "have the controller wake it (POST /action/wakeup/MODEL, or a request for its model); an"
        " engine without a controller by itself, vLLM with POST /wake_up",
        is_blocked=True,
    )


def _limit(status: InstanceStatus, ledger: LedgerInfo | None) -> Iterable[Finding]:
    limit = _limit_text(status)
    if status.is_squeezed:
        yield line(
            "limit",
            f"Its limit is {format_limit(status.limit_bytes, status.page_bytes)}; it keeps to"
            f" {limit} for now, because it owes memory to other instances, or because the"
            " machine has too little left.",
            f"kvctl set {status.name} --min SIZE or a higher --priority, if it should keep more"
            " than others; kvctl doctor, if the machine is short of memory",
        )
    if status.over_bytes:
        yield _over(status)
        return
    if 0 < status.capacity_bytes < status.page_bytes:
        page = size_argument(status.page_bytes)
        yield line(
            "limit",
            f"Its device has {format_size(status.capacity_bytes)}, less than one page of"
            f" {format_size(status.page_bytes)}: it allocates no block.",
            f"kvctl capacity {status.device} SIZE with {page} or more",
            is_blocked=True,
        )
        return
    is_whole = 0 < status.capacity_bytes < status.effective_limit_bytes + status.page_bytes
    if status.room_bytes >= max(1, status.page_bytes):
        room = f"{format_size(status.room_bytes)} more fit"
        whole = ", which is the whole device" if is_whole else ""
        if status.is_limited:
            yield line("limit", f"Its limit is {limit}{whole}: {room}.")
        else:
            of_what = "of the device" if is_whole else "of the addresses that it reserved"
            yield line("limit", f"It has no limit: {room} within the {limit} {of_what}.")
        return
    # A larger limit helps only if the limit is binding and the device has memory to give.
    can_grow = status.is_limit_binding and not status.is_squeezed and not is_whole
    can_grow = can_grow and has_memory_for(status, ledger)
    if status.spare_bytes:
        yield line(
            "limit",
            f"Its limit of {limit} is reached: new blocks take the place of the"
            f" {format_size(status.spare_bytes)} that are parked, set aside or cached.",
            f"kvctl limit {status.name} SIZE, if it should cache more" if can_grow else "",
        )
    elif status.blocks_available:
        count = _blocks(status.blocks_available)
        yield line("limit", f"Its limit of {limit} is reached; {count} can still be allocated.")
    else:
        yield line(
            "limit",
            f"Its limit of {limit} is reached, and nothing is parked, set aside or cached: new"
            " requests wait until blocks are freed.",
            f"kvctl limit {status.name} SIZE, with a larger one" if can_grow else "",
            is_blocked=True,
        )


def _setter(status: InstanceStatus) -> Iterable[Finding]:
    if status.is_limit_of_kvcached_client:
        yield line(
            "set by",
            f"A kvcached client set the limit, by /dev/shm/{status.kvcached_name}.",
        )


def _over(status: InstanceStatus) -> Finding:
    over, limit = format_size(status.over_bytes), _limit_text(status)
    over += f" over {'that' if status.is_squeezed else f'its limit of {limit}'}"
    spare_bytes = status.spare_bytes
    if status.over_bytes > spare_bytes:
        spare = f"only {format_size(spare_bytes)} of it are" if spare_bytes else "nothing of it is"
        what = (
            f"It is {over}, and {spare} parked or cached: the rest is in"
            " use, so it allocates no block until requests end or are preempted."
        )
        do = "wait"
        if status.is_limit_binding and not status.is_squeezed:
            do += f", or raise the limit: kvctl limit {status.name} SIZE"
    else:
        what = (
            f"It is {over}, and releases parked pages and cached blocks; cached blocks in pages"
            " that also hold blocks in use are released with these."
        )
        do = "look again; if it stays so, wait for requests to end"
    return line("limit", what, do, is_blocked=True)


def _limit_text(status: InstanceStatus) -> str:
    """Return the limit in force: its own with whole pages, or a lower one under memory pressure."""
    if status.is_limit_binding and not status.is_squeezed:
        return format_limit(status.limit_bytes, status.page_bytes)
    return format_size(status.effective_limit_bytes)


def _part(status: InstanceStatus, size_bytes: int) -> str:
    return f"{format_size(size_bytes)} ({100 * size_bytes / status.mapped_bytes:.0f}%)"


def explain_tiers(shown: TiersFigures | None) -> Iterable[Finding]:
    """Report what tiers hold, what happened to evicted blocks, and which tiers fail."""
    if shown is None or not shown.tiers:
        return
    blocks = shown.blocks
    what = f"Tiers keep {', '.join(map(_kept, shown.tiers))}."
    if evicted := blocks.demoted + blocks.dropped:
        what += f" Of {evicted} evicted blocks {blocks.demoted} have a copy there."
    if blocks.matched + blocks.unmatched:
        # Without the lookups: one prompt may look for a block many times before it is loaded.
        what += f" Since its start requests loaded {_blocks(blocks.loaded)} from there"
        what += f", and computed {blocks.missed} that it could not load." if blocks.missed else "."
    many_dropped = blocks.dropped > blocks.demoted
    do = "docs/tiers.md says why blocks are dropped without a copy" if many_dropped else ""
    yield line("tiers", what, do)
    for tier in shown.tiers:
        failed = f"{tier.errors} call{'' if tier.errors == 1 else 's'} to it failed"
        if tier.state == "failing":
            what = f"{tier.tier} is failing: {tier.problem}. {failed}."
            do = f"mend the medium of {tier.tier}; kvelastic tries it again within a minute"
            yield line("tiers", what, do, state="problem")
        elif tier.state != "ok":
            what = f"{tier.tier} does not respond, and is not used until it does. {failed}."
            yield line("tiers", what, f"look at the medium of {tier.tier}", state="problem")
        elif tier.write_left_bytes == 0:
            yield line(
                "tiers",
                f"{tier.tier} has used its write budget of this day; it stores nothing more until"
                " midnight UTC.",
                "a larger KVELASTIC_TIER_DAILY_WRITE, if the medium may wear faster",
            )


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"


def _kept(tier: TierFigures) -> str:
    limit = "" if tier.limit_bytes is None else f" of {format_size(tier.limit_bytes)}"
    return f"{_blocks(tier.records)} on {tier.tier} ({format_size(tier.used_bytes)}{limit})"


def _problems(facts: Facts, of: str) -> Iterator[Said]:
    for status in facts.instances:
        for finding in (*explain_waiting(status), *explain_tiers(status.shown_tiers)):
            if finding.about == of and finding.state == "problem":
                yield problem(f"{status.name}: {finding.what}", finding.do)


@check("instances.waiting", fine="no request needs more than its limit allows")
def _waiting(facts: Facts) -> Iterator[Said]:
    return _problems(facts, "waiting")


@check("instances.tiers", fine="no tier of an instance fails")
def _tiers(facts: Facts) -> Iterator[Said]:
    return _problems(facts, "tiers")


CHECKS: Final = (_waiting, _tiers)
