"""The metrics of instances, ledgers, tiers and links: names, labels and sources.

`Described.field` names the attribute that a metric is read from. docs/metrics.md is generated from
this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

# Not `instance`: Prometheus uses that label for the scrape target, and would rename ours.
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
Table = tuple["Described", ...]


@dataclass(frozen=True)
class Described:
    """One metric: its full name, kind, labels and description."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    field: str = ""
    """Source attribute, or its path; empty: computed."""


def table(prefix: str, labels: tuple[str, ...], *rows: tuple[str, ...]) -> Table:
    """Return a table from rows of (name, meaning), and the attribute if its name differs."""
    return tuple(
        Described(
            f"kvelastic_{prefix}{name}",
            "counter" if name.endswith("_total") else "gauge",
            labels,
            help,
            *(field or [name.removesuffix("_total")]),
        )
        for name, help, *field in rows
    )


STATISTICS: Final = table(
    "instance_",
    INSTANCE_LABELS,
    ("capacity_bytes", "Capacity of its device."),
    ("mapped_bytes", "All physical memory of the instance."),
    ("in_use_bytes", "In blocks in use by requests."),
    ("set_aside_bytes", "In blocks set aside for later requests."),
    ("cached_bytes", "In blocks kept for prefix caching."),
    ("parked_bytes", "In free pages kept mapped for the next use."),
    ("slack_bytes", "In free blocks of pages in use, and in padding."),
    ("page_bytes", "One page."),
    ("blocks", "Blocks of its address range.", "blocks_total"),
    ("blocks_in_use", "Blocks in use by requests."),
    ("blocks_cached", "Blocks kept for prefix caching."),
    ("asleep", "1 while its memory sleeps."),
    ("engine_asleep", "1 while its engine sleeps and requests wait; if known."),
    ("requests_waiting", "Requests that wait for memory; if the engine reports them."),
    ("first_needs_bytes", "Lowest limit with which the first waiting request runs; 0: unknown."),
    (
        "limit_too_low",
        "1 while the first waiting request needs more than limit and device allow.",
        "is_limit_too_low",
    ),
    ("limit_bytes", "Its limit, as it was set; kept during a sleep."),
    (
        "effective_limit_bytes",
        "The present limit: whole pages, lower under memory pressure, 0 during a sleep.",
    ),
    ("over_bytes", "Still to be released to meet that limit."),
    ("min_bytes", "Its guarantee: no other instance takes memory below it."),
    ("priority", "Higher keeps its memory longer."),
)
"""Read from `InstanceStatus`."""
MEMBER: Final = table(
    "instance_",
    INSTANCE_LABELS,
    ("granted_bytes", "Granted by the device's ledger now."),
    ("reserved_bytes", "Memory besides its KV cache while it is awake.", "reserve_bytes"),
    ("asked_bytes", "Memory that it waits for.", "ask_bytes"),
    ("asked_seconds", "How long it has waited for that memory.", "ask_s"),
    ("wanted_bytes", "Memory that other instances request from it."),
    ("idle_seconds", "Time since its last alloc or free.", "idle_s"),
)
"""Read from `Member`."""
COUNTERS: Final = table(
    "instance_",
    INSTANCE_LABELS,
    ("pages_mapped_total", "Pages mapped since its start."),
    ("pages_unmapped_total", "Pages unmapped since its start."),
    ("pages_created_total", "Pages created by the driver since its start."),
    ("pages_destroyed_total", "Pages destroyed by the driver since its start."),
    ("allocs_total", "Successful allocs."),
    ("frees_total", "Frees."),
    ("alloc_failures_total", "Failed allocs."),
    ("blocks_evicted_total", "Cached blocks evicted."),
    ("blocks_demoted_total", "Cached blocks evicted with a copy in a tier."),
    ("blocks_dropped_total", "Cached blocks evicted without a copy: they are computed again."),
    ("blocks_moved_total", "Blocks moved to other pages to release theirs."),
    ("requests_applied_total", "Requests of operators applied."),
    ("provision_runs_total", "Runs in which pages were mapped ahead of demand."),
)
"""Read from the control block's counters, by name."""
TIER: Final = table(
    "tier_",
    ("name", "tier"),
    ("used_bytes", "Size of its records."),
    ("limit_bytes", "Its limit, if kvelastic enforces one."),
    ("records", "Blocks kept there."),
    ("stuck", "1 while it hangs and is bypassed.", "is_stuck"),
    ("load_seconds", "Time to load a block.", "load_s"),
    ("write_budget_bytes", "Bytes that may be written in a day (UTC), if bounded."),
    ("write_left_bytes", "The rest of that budget today."),
    ("waiting_bytes", "Bytes of a nearer tier still to be copied to it."),
    ("puts_total", "Records stored."),
    ("refused_total", "Records not stored: no room, a budget, a failure."),
    ("hits_total", "Records read whole."),
    ("misses_total", "Lookups of missing records."),
    ("torn_total", "Damaged records found."),
    ("evicted_total", "Records evicted for others or by a limit."),
    ("errors_total", "Calls to the medium that failed."),
    ("written_bytes_total", "Bytes written to it.", "bytes_written"),
    ("read_bytes_total", "Bytes read from it.", "bytes_read"),
)
"""Read from `TierStatus`."""
TIERS: Final = table(
    "tiers_blocks_",
    ("name",),
    ("matched_total", "Blocks looked up and found in tiers."),
    ("unmatched_total", "Blocks looked up and not found in tiers."),
    ("loaded_total", "Blocks loaded from tiers."),
    ("missed_total", "Blocks found in tiers but not loaded."),
    ("served_total", "Blocks copied to tiers while shrinking waited."),
    ("ahead_total", "Blocks copied to tiers while nothing waited."),
    ("refused_total", "Blocks that every tier refused."),
    ("late_total", "Copies to tiers cancelled at a deadline."),
    ("lost_total", "Blocks used, evicted or renamed during their copy."),
)
"""Read from `BlockCounts`."""
NODE: Final = table(
    "node_",
    NODE_LABELS,
    ("links", "Open links.", "standing_links"),
    ("registered_bytes", "Memory that peers may reach."),
    ("leases", "Copies by peers in progress."),
    ("leases_expired_total", "Leases that expired because a peer was late."),
    ("copies_lost_total", "Copies by peers of memory that changed during the copy."),
    ("strangers_refused_total", "Refused unauthenticated connections."),
)
"""Read from `NodeStatus`."""
LINK: Final = table(
    "link_",
    (*NODE_LABELS, "peer"),
    ("up", "1 for an open link, 0 for an ended one.", "is_linked"),
    ("pulled_bytes_total", "Bytes that the node has read from the peer."),
    ("pushed_bytes_total", "Bytes that the node has sent for the peer to take."),
    ("peer_pulled_bytes_total", "Bytes that the peer has read from the node."),
    ("peer_pushed_bytes_total", "Bytes that the peer has sent for the node to take."),
    ("leases", "Copies by the peer in progress."),
    ("retries_total", "Copies repeated after a lost race."),
    ("failures_total", "Failed copies of the node."),
)
"""Read from `LinkStatus`."""
DEVICE: Final = table(
    "device_",
    DEVICE_LABELS,
    ("capacity_bytes", "Capacity for the instances together."),
    ("granted_bytes", "Granted to the instances together."),
    ("guaranteed_bytes", "Sum of the guarantees of awake instances."),
    ("reserved_bytes", "Memory besides KV caches of awake instances."),
    ("others_bytes", "Used by other processes, when last read."),
    ("free_bytes", "Memory that could be granted now."),
    ("asked_bytes", "Memory that instances wait for: the pressure on the device."),
    ("instances", "Instances that share the device."),
)
"""Read from `LedgerInfo`."""
ON_DEVICE, STARTED = table(
    "instance_",
    INSTANCE_LABELS,
    ("device_mapped_bytes", "Physical memory of the instance on each device.", ""),
    ("start_time_seconds", "Start of the instance, in Unix time.", ""),
)
(STATE,) = table(
    "instance_",
    (*INSTANCE_LABELS, "state"),
    ("state", "1 for the state of its limit, 0 for the others."),
)
(INFO,) = table(
    "instance_", (*INSTANCE_LABELS, "pid", "uuid"), ("info", "Identity labels; always 1.")
)
(SEGMENTS,) = table(
    "", ("status",), ("segments", "Segments found: alive, closing, dead, unknown, unreadable.")
)
(UNREADABLE,) = table("", (), ("ledgers_unreadable", "Ledgers that this user cannot read."))

METRICS: Final[Table] = (
    *STATISTICS, ON_DEVICE, STATE, *MEMBER, *COUNTERS, STARTED, INFO, *TIER, *TIERS, *NODE, *LINK,
    *DEVICE, SEGMENTS, UNREADABLE,
)  # fmt: skip
"""Every metric, in display order."""
