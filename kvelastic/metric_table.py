"""The metrics of instances and ledgers, of their tiers and links: names, labels, and what is read.

Where all rows of a table are read of one object, a row has the function that does so; the others
are drawn in `metrics`. docs/metrics.md is printed from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from kvelastic.ledger_facts import LedgerInfo, Member
from kvelastic.link_status import LinkFigures, NodeFigures
from kvelastic.tier_status import TierFigures

# Not `instance`: that is Prometheus' own label for whom it scrapes, and it would rename ours.
INSTANCE_LABELS: Final = ("name", "device", "engine", "model")
NODE_LABELS: Final = ("node", "pid", "role")
DEVICE_LABELS: Final = ("device", "group")
STATES: Final = (
    "applied",
    "shrinking",
    "refused",
    "failed",
    "pending",
    "closing",
    "unknown",
)
STATUSES: Final = ("alive", "closing", "dead", "unknown", "unreadable")

Kind = Literal["gauge", "counter"]
Value = int | float | None


@dataclass(frozen=True)
class Described:
    """One metric: its full name, what kind it is, its labels, and what it says."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


def _instance(name: str, help: str, *more: str, kind: Kind = "gauge") -> Described:
    return Described(f"kvelastic_instance_{name}", kind, (*INSTANCE_LABELS, *more), help)


def _tiers(name: str, help: str) -> Described:
    return Described(f"kvelastic_tiers_{name}", "counter", ("name",), help)


def _tier(name: str, help: str, kind: Kind = "gauge") -> Described:
    return Described(f"kvelastic_tier_{name}", kind, ("name", "tier"), help)


def _node(name: str, help: str, kind: Kind = "gauge") -> Described:
    return Described(f"kvelastic_node_{name}", kind, NODE_LABELS, help)


def _link(name: str, help: str, kind: Kind = "counter") -> Described:
    return Described(f"kvelastic_link_{name}", kind, (*NODE_LABELS, "peer"), help)


def _device(name: str, help: str) -> Described:
    return Described(f"kvelastic_device_{name}", "gauge", DEVICE_LABELS, help)


FIGURES: Final = {
    "capacity_bytes": _instance("capacity_bytes", "Capacity of its device."),
    "mapped_bytes": _instance("mapped_bytes", "All physical memory of the instance."),
    "in_use_bytes": _instance("in_use_bytes", "In blocks in use by requests."),
    "set_aside_bytes": _instance("set_aside_bytes", "In blocks set aside for later requests."),
    "cached_bytes": _instance("cached_bytes", "In blocks kept for prefix caching."),
    "parked_bytes": _instance("parked_bytes", "In free pages kept mapped for the next use."),
    "slack_bytes": _instance("slack_bytes", "In free blocks of pages in use, and in padding."),
    "page_bytes": _instance("page_bytes", "One page."),
    "blocks_total": _instance("blocks", "Blocks of its address range."),
    "blocks_in_use": _instance("blocks_in_use", "Blocks in use by requests."),
    "blocks_cached": _instance("blocks_cached", "Blocks kept for prefix caching."),
    "asleep": _instance("asleep", "1 while its memory sleeps."),
    "engine_asleep": _instance(
        "engine_asleep", "1 while its engine sleeps and requests wait; if known."
    ),
    "requests_waiting": _instance(
        "requests_waiting", "Requests that wait for memory; if the engine reports them."
    ),
    "first_needs_bytes": _instance(
        "first_needs_bytes", "Lowest limit with which the first waiting request runs; 0: unknown."
    ),
    "is_limit_too_low": _instance(
        "limit_too_low",
        "1 while the first waiting request needs more than limit and device allow.",
    ),
    "limit_bytes": _instance("limit_bytes", "Its limit, as it was set; kept during a sleep."),
    "effective_limit_bytes": _instance(
        "effective_limit_bytes",
        "The present limit: whole pages, lower under memory pressure, 0 during a sleep.",
    ),
    "over_bytes": _instance("over_bytes", "Still to be released to meet that limit."),
    "min_bytes": _instance("min_bytes", "Its guarantee: no other instance takes memory below it."),
    "priority": _instance("priority", "Higher keeps its memory longer."),
}
"""By the fields of `InstanceStatus`."""
COUNTERS: Final = {
    name: _instance(f"{name}_total", help, kind="counter")
    for name, help in {
        "pages_mapped": "Pages mapped since its start.",
        "pages_unmapped": "Pages unmapped since its start.",
        "pages_created": "Pages created by the driver since its start.",
        "pages_destroyed": "Pages destroyed by the driver since its start.",
        "allocs": "Successful allocs.",
        "frees": "Frees.",
        "alloc_failures": "Failed allocs.",
        "blocks_evicted": "Cached blocks evicted.",
        "blocks_demoted": "Cached blocks evicted with a copy in a tier.",
        "blocks_dropped": "Cached blocks evicted without a copy: they are computed again.",
        "blocks_moved": "Blocks moved to other pages to release theirs.",
        "requests_applied": "Requests of operators applied.",
        "provision_runs": "Runs in which pages were mapped ahead of demand.",
    }.items()
}
MEMBER: Final[tuple[tuple[Described, Callable[[Member], Value]], ...]] = (
    (
        _instance("granted_bytes", "Granted by the device's ledger now."),
        lambda member: member.granted_bytes,
    ),
    (
        _instance("reserved_bytes", "Memory besides its KV cache while it is awake."),
        lambda member: member.reserve_bytes,
    ),
    (
        _instance("asked_bytes", "Memory that it waits for."),
        lambda member: member.ask_bytes,
    ),
    (
        _instance("asked_seconds", "How long it has waited for that memory."),
        lambda member: member.ask_s,
    ),
    (
        _instance("wanted_bytes", "Memory that other instances request from it."),
        lambda member: member.wanted_bytes,
    ),
    (
        _instance("idle_seconds", "Time since its last alloc or free."),
        lambda member: member.idle_s,
    ),
)
DEVICE: Final[tuple[tuple[Described, Callable[[LedgerInfo], Value]], ...]] = (
    (
        _device("capacity_bytes", "Capacity for the instances together."),
        lambda ledger: ledger.capacity_bytes,
    ),
    (
        _device("granted_bytes", "Granted to the instances together."),
        lambda ledger: ledger.granted_bytes,
    ),
    (
        _device("guaranteed_bytes", "Sum of the guarantees of awake instances."),
        lambda ledger: ledger.guaranteed_bytes,
    ),
    (
        _device("reserved_bytes", "Memory besides KV caches of awake instances."),
        lambda ledger: ledger.reserved_bytes,
    ),
    (
        _device("others_bytes", "Used by other processes, when last read."),
        lambda ledger: ledger.others_bytes,
    ),
    (
        _device("free_bytes", "Memory that could be granted now."),
        lambda ledger: ledger.free_bytes,
    ),
    (
        _device("asked_bytes", "Memory that instances wait for: the pressure on the device."),
        lambda ledger: ledger.asked_bytes,
    ),
    (
        _device("instances", "Instances that share the device."),
        lambda ledger: len(ledger.members),
    ),
)
TIER: Final[tuple[tuple[Described, Callable[[TierFigures], Value]], ...]] = (
    (_tier("used_bytes", "Size of its records."), lambda tier: tier.used_bytes),
    (
        _tier("limit_bytes", "Its limit, if kvelastic enforces one."),
        lambda tier: tier.limit_bytes,
    ),
    (_tier("records", "Blocks kept there."), lambda tier: tier.records),
    (_tier("stuck", "1 while it hangs and is bypassed."), lambda tier: int(tier.is_stuck)),
    (
        _tier("load_seconds", "Time to load a block."),
        lambda tier: None if tier.load_us is None else tier.load_us / 1e6,
    ),
    (
        _tier("write_budget_bytes", "Bytes that may be written in a day (UTC), if bounded."),
        lambda tier: tier.write_budget_bytes,
    ),
    (
        _tier("write_left_bytes", "The rest of that budget today."),
        lambda tier: tier.write_left_bytes,
    ),
    (
        _tier("waiting_bytes", "Bytes of a nearer tier still to be copied to it."),
        lambda tier: tier.waiting_bytes,
    ),
    (_tier("puts_total", "Records stored.", "counter"), lambda tier: tier.puts),
    (
        _tier("refused_total", "Records not stored: no room, a budget, a failure.", "counter"),
        lambda tier: tier.refused,
    ),
    (_tier("hits_total", "Records read whole.", "counter"), lambda tier: tier.hits),
    (
        _tier("misses_total", "Lookups of missing records.", "counter"),
        lambda tier: tier.misses,
    ),
    (
        _tier("torn_total", "Damaged records found.", "counter"),
        lambda tier: tier.torn,
    ),
    (
        _tier("evicted_total", "Records evicted for others or by a limit.", "counter"),
        lambda tier: tier.evicted,
    ),
    (_tier("errors_total", "Calls to the medium that failed.", "counter"), lambda t: t.errors),
    (
        _tier("written_bytes_total", "Bytes written to it.", "counter"),
        lambda tier: tier.bytes_written,
    ),
    (_tier("read_bytes_total", "Bytes read from it.", "counter"), lambda tier: tier.bytes_read),
)
NODE: Final[tuple[tuple[Described, Callable[[NodeFigures], Value]], ...]] = (
    (
        _node("links", "Open links."),
        lambda node: sum(link.state == "linked" for link in node.links),
    ),
    (_node("registered_bytes", "Memory that peers may reach."), lambda n: n.registered_bytes),
    (_node("leases", "Copies by peers in progress."), lambda node: node.leases),
    (
        _node("leases_expired_total", "Leases that expired because a peer was late.", "counter"),
        lambda node: node.leases_expired,
    ),
    (
        _node(
            "copies_lost_total",
            "Copies by peers of memory that changed during the copy.",
            "counter",
        ),
        lambda node: node.copies_lost,
    ),
    (
        _node("strangers_refused_total", "Refused unauthenticated connections.", "counter"),
        lambda node: node.strangers_refused,
    ),
)
LINK: Final[tuple[tuple[Described, Callable[[LinkFigures], Value]], ...]] = (
    (
        _link("up", "1 for an open link, 0 for an ended one.", "gauge"),
        lambda link: int(link.state == "linked"),
    ),
    (
        _link("pulled_bytes_total", "Bytes that the node has read from the peer."),
        lambda link: link.pulled_bytes,
    ),
    (
        _link("pushed_bytes_total", "Bytes that the node has sent for the peer to take."),
        lambda link: link.pushed_bytes,
    ),
    (
        _link("peer_pulled_bytes_total", "Bytes that the peer has read from the node."),
        lambda link: link.peer_pulled_bytes,
    ),
    (
        _link("peer_pushed_bytes_total", "Bytes that the peer has sent for the node to take."),
        lambda link: link.peer_pushed_bytes,
    ),
    (_link("leases", "Copies by the peer in progress.", "gauge"), lambda link: link.leases),
    (_link("retries_total", "Copies repeated after a lost race."), lambda link: link.retries),
    (_link("failures_total", "Failed copies of the node."), lambda link: link.failures),
)
TIERS: Final = {
    field: _tiers(f"blocks_{field}_total", help)
    for field, help in {
        "matched": "Blocks looked up and found in tiers.",
        "unmatched": "Blocks looked up and not found in tiers.",
        "loaded": "Blocks loaded from tiers.",
        "missed": "Blocks found in tiers but not loaded.",
        "served": "Blocks copied to tiers while shrinking waited.",
        "ahead": "Blocks copied to tiers while nothing waited.",
        "refused": "Blocks that every tier refused.",
        "late": "Copies to tiers cancelled at a deadline.",
        "lost": "Blocks used, evicted or renamed during their copy.",
    }.items()
}
"""By the fields of `BlockCounts`."""
ON_DEVICE: Final = _instance(
    "device_mapped_bytes", "Physical memory of the instance on each device."
)
STATE: Final = _instance("state", "1 for the state of its limit, 0 for the others.", "state")
INFO: Final = _instance("info", "Identity labels; always 1.", "pid", "uuid")
STARTED: Final = _instance("start_time_seconds", "Start of the instance, in Unix time.")
SEGMENTS: Final = Described(
    "kvelastic_segments", "gauge", ("status",), "Segments found: " + ", ".join(STATUSES) + "."
)
UNREADABLE: Final = Described(
    "kvelastic_ledgers_unreadable", "gauge", (), "Ledgers that this user cannot read."
)

METRICS: Final[tuple[Described, ...]] = (
    *FIGURES.values(),
    ON_DEVICE,
    STATE,
    *(described for described, _ in MEMBER),
    *COUNTERS.values(),
    STARTED,
    INFO,
    *(described for described, _ in TIER),
    *TIERS.values(),
    *(described for described, _ in NODE),
    *(described for described, _ in LINK),
    *(described for described, _ in DEVICE),
    SEGMENTS,
    UNREADABLE,
)
"""Every metric that there is."""
