"""Findings about an instance's ledger: guarantee, priority, and requests for memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kvelastic.doctor.finding import Finding, line
from kvelastic.units import format_limit, whole_pages
from kvelastic.units import format_size as _size

if TYPE_CHECKING:
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.shared.ledger_facts import LedgerInfo, Member

_NAMES_SHOWN: Final = 3


def explain_ledger(status: InstanceStatus, ledger: LedgerInfo | None) -> list[Finding]:
    """Return the findings about an instance and the other members of its ledger."""
    if ledger is None:
        return [
            *_guarantee(status, held_bytes=status.mapped_bytes, has_others=False),
            line("others", "It has joined no ledger: it shares no memory with other instances."),
        ]
    me = member_of(status, ledger)
    if me is None:
        return [
            line(
                "others",
                f"The ledger of its device cannot be read ({ledger.problem or ledger.status}):"
                " memory requests of other instances are unknown.",
                "run the same version of kvctl as the user of these instances"
                if ledger.status == "foreign"
                else "run kvctl doctor",
            )
        ]
    others = [member for member in ledger.members if member is not me]
    living = [member for member in others if member.status != "dead"]
    return [
        *_guarantee(status, held_bytes=me.granted_bytes, has_others=bool(living)),
        *_reserve(me),
        *_priority(me, living),
        *_device(ledger, living),
        *_dead(others),
        *_own_ask(me, living, ledger),
        *_reclaim_requests_to(me, living),
    ]


def member_of(status: InstanceStatus, ledger: LedgerInfo | None) -> Member | None:
    """Return the instance's entry in a ledger, or None."""
    members = () if ledger is None else ledger.members
    return next((member for member in members if member.uuid == status.uuid), None)


def has_memory_for(status: InstanceStatus, ledger: LedgerInfo | None) -> bool:
    """Return whether the device could give the instance a page; True if not known.

    The page is free, or another member with a lower priority, or with more than an equal share,
    holds it.
    """
    me = member_of(status, ledger)
    if ledger is None or me is None:
        return True
    if ledger.free_bytes >= status.page_bytes:
        return True
    living = [member for member in ledger.members if member.status != "dead"]
    share_bytes = ledger.capacity_bytes // max(len(living), 1)
    return any(
        other.granted_bytes > other.min_bytes
        and (
            other.priority < me.priority
            or (other.priority == me.priority and other.granted_bytes > share_bytes)
        )
        for other in living
        if other is not me
    )


def _guarantee(status: InstanceStatus, *, held_bytes: int, has_others: bool) -> Iterable[Finding]:
    guarantee = format_limit(status.min_bytes, status.page_bytes)
    counted_bytes = whole_pages(status.min_bytes, status.page_bytes) if status.min_bytes else 0
    if status.asleep:
        if counted_bytes:
            yield line(
                "guarantee", f"Its guarantee is {guarantee}, which does not apply while it sleeps."
            )
    elif counted_bytes > status.effective_limit_bytes:
        yield line(
            "guarantee",
            f"Its guarantee is {guarantee}, but its limit is only"
            f" {_size(status.effective_limit_bytes)}.",
            f"run kvctl set {status.name} with a larger --limit or a smaller --min",
        )
    elif counted_bytes > held_bytes:
        yield line(
            "guarantee",
            f"Its guarantee is {guarantee}: it can claim {_size(counted_bytes - held_bytes)} more,"
            " even if other instances hold it now.",
        )
    elif counted_bytes:
        yield line(
            "guarantee",
            f"Its guarantee is {guarantee}: other instances may take at most"
            f" {_size(held_bytes - counted_bytes)} of its memory.",
        )
    elif has_others:
        yield line(
            "guarantee",
            "It has no guarantee: other instances may take all its memory.",
            f"run kvctl set {status.name} --min SIZE to guarantee that much",
        )


def _reserve(me: Member) -> Iterable[Finding]:
    """Report the reserve besides the KV cache, and what the instance needs before it wakes."""
    if me.pledged_bytes > (0 if me.asleep else me.reserve_bytes):
        yield line(
            "reserve",
            f"It waits for {_size(me.pledged_bytes)} for weights and activations"
            f"{' before it wakes' if me.asleep else ''}: other instances are requested to release"
            " it, for at most five seconds.",
            is_blocked=True,
        )
    elif me.asleep and (me.reserve_bytes or me.min_bytes):
        needs = [f"{_size(me.reserve_bytes)} for weights and activations"] * bool(me.reserve_bytes)
        needs += [f"its guarantee of {_size(me.min_bytes)}"] * bool(me.min_bytes)
        yield line(
            "reserve",
            f"Before it wakes it requests {' and '.join(needs)}; until then other instances may"
            " use them.",
        )
    elif me.reserve_bytes:
        yield line(
            "reserve",
            f"{_size(me.reserve_bytes)} are reserved for its weights and activations, outside its"
            " KV cache.",
        )


def _priority(me: Member, others: list[Member]) -> Iterable[Finding]:
    if not others:
        return
    higher = [other for other in others if other.priority > me.priority]
    lower = [other for other in others if other.priority < me.priority]
    parts = [f"Its priority is {me.priority}"]
    if higher:
        parts.append(f"higher: {_names(higher)}")
    if lower:
        parts.append(f"lower: {_names(lower)}")
    if not higher and not lower:
        parts.append("equal to all other instances here")
    yield line("priority", f"{'; '.join(parts)}.")


def _device(ledger: LedgerInfo, others: list[Member]) -> Iterable[Finding]:
    what = (
        f"{_size(ledger.free_bytes)} of the device's {_size(ledger.capacity_bytes)} are free"
        f"; {_count(len(others), 'other instance')}"
        f" {'holds' if len(others) == 1 else 'hold'}"
        f" {_size(sum(other.granted_bytes for other in others))}."
    )
    if not others:
        what = (
            f"{_size(ledger.free_bytes)} of the device's {_size(ledger.capacity_bytes)} are free,"
            " and no other instance uses it."
        )
    yield line("device", what)
    if ledger.reserved_bytes:
        yield line(
            "device",
            f"{_size(ledger.reserved_bytes)} are reserved for weights and activations of awake"
            f" instances{_taken(ledger)}.",
        )
    if ledger.others_bytes:
        yield line("device", f"Other processes use {_size(ledger.others_bytes)} of the device.")


def _taken(ledger: LedgerInfo) -> str:
    """Describe which part of the reserves KV caches cannot use; on a GPU, all of it."""
    taken_bytes = ledger.reserved_of_capacity_bytes
    if taken_bytes == ledger.reserved_bytes:
        return "; KV caches cannot use it"
    beside = f"not part of the {_size(ledger.capacity_bytes)} for KV caches"
    if not taken_bytes:
        return f"; this is {beside}"
    return f"; {_size(ledger.reserved_bytes - taken_bytes)} of it is {beside}"


def _dead(others: list[Member]) -> Iterable[Finding]:
    for other in others:
        if other.status == "dead" and other.granted_bytes:
            yield line(
                "device",
                f"{other.name} has ended but still has {_size(other.granted_bytes)} granted.",
                "run kvctl gc",
            )


def _own_ask(me: Member, others: list[Member], ledger: LedgerInfo) -> Iterable[Finding]:
    if not me.ask_bytes:
        return
    asks = f"It requests {_size(me.ask_bytes)} more and has waited {me.ask_s:.1f} s"
    if ledger.free_bytes >= me.ask_bytes:
        rivals = [other for other in others if other.ask_bytes]
        yield line(
            "asks",
            f"{asks}; {_size(ledger.free_bytes)} are free, "
            + (f"also requested by {_names(rivals)}." if rivals else "so the grant is imminent."),
            is_blocked=bool(rivals),
        )
        return
    givers = [other for other in others if other.wanted_bytes]
    if not givers:
        above = sorted(
            (other for other in others if other.granted_bytes > other.min_bytes),
            key=lambda other: other.min_bytes - other.granted_bytes,
        )
        if above:
            why = f"no instance has to release any yet, but {_names(above)} could"
            do = (
                f"run kvctl set {me.name} --priority {max(x.priority for x in above) + 1}, or lower"
                f" the limit of {above[0].name}"
            )
        else:
            why = "no instance holds more than its guarantee"
            do = "lower --min or the limit of another instance, or run fewer instances"
        yield line("asks", f"{asks}: {why}.", do, is_blocked=True)
        return
    yield line("asks", f"{asks} for {_names(givers)} to release memory.", is_blocked=True)
    for giver in givers:
        yield line("asks", f"{giver.name} {_giving(giver)}.", is_blocked=True)


def _giving(giver: Member) -> str:
    """Describe how another member responds to a request for memory."""
    wanted, spare_bytes = _size(giver.wanted_bytes), giver.parked_bytes + giver.evictable_bytes
    if giver.status == "unknown":
        return f"was requested to release {wanted}, and its liveness is unknown"
    if spare_bytes >= giver.wanted_bytes:
        return f"was requested to release {wanted} and releases parked pages and cached blocks"
    return (
        f"was requested to release {wanted}, of which {_spare(giver)} parked or cached; the rest is"
        " in use until its requests end or are preempted"
    )


def _reclaim_requests_to(me: Member, others: list[Member]) -> Iterable[Finding]:
    for other in others:
        if other.ask_bytes:
            yield line(
                "asked",
                f"{other.name} (priority {other.priority}, holds {_size(other.granted_bytes)})"
                f" requests {_size(other.ask_bytes)} and has waited {other.ask_s:.1f} s.",
            )
    if not me.wanted_bytes:
        return
    wanted, spare_bytes = _size(me.wanted_bytes), me.parked_bytes + me.evictable_bytes
    may_go_bytes = max(0, me.granted_bytes - me.min_bytes)
    if may_go_bytes == 0:
        yield line(
            "asked", f"It was requested to release {wanted}, but holds no more than its guarantee."
        )
    elif spare_bytes >= me.wanted_bytes:
        yield line(
            "asked",
            f"It was requested to release {wanted}, and releases parked pages and cached blocks.",
        )
    else:
        yield line(
            "asked",
            f"It was requested to release {wanted}, of which {_spare(me)} parked or cached. The"
            " rest is in use: it allocates no blocks until requests end or are preempted.",
            f"run kvctl set {me.name} --min SIZE or a higher --priority to let it keep its memory",
            is_blocked=True,
        )


def _spare(member: Member) -> str:
    spare_bytes = member.parked_bytes + member.evictable_bytes
    return f"{_size(spare_bytes)} is" if spare_bytes else "none is"


def _names(members: list[Member]) -> str:
    names = [member.name for member in members[:_NAMES_SHOWN]]
    rest = len(members) - len(names)
    if rest:
        names.append(_count(rest, "other"))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
