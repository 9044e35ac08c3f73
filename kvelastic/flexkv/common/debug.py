"""Lists an engine's open and ended tasks, to find out why a request waits.

print(describe(manager.task_engine))
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvelastic.sizes import format_size


class TaskRecord(NamedTuple):
    """Summary of one task."""

    task_id: int
    kind: str
    status: str
    tokens: int
    seconds: float
    """Time from the match to the end, or until now."""


def describe(engine: Any, most: int = 20) -> str:
    """Return lines about a KVTaskEngine's tiers, open tasks and last ended tasks.

    Queries the stores, which may block.
    """
    lines = ["tiers:"]
    stuck = engine.transfer_engine.stuck_tiers
    for place, (device, store) in enumerate(engine.storage.stores.items()):
        if place in stuck:
            lines.append(f"  {device.name}: does not answer")
            continue
        capacity, done = store.capacity(), store.statistics()
        lines.append(
            f"  {device.name}: {capacity.records} blocks, {format_size(capacity.used_bytes)};"
            f" {done.puts} put, {done.refused} refused, {done.hits} read, {done.misses} missed,"
            f" {done.evicted} evicted, {done.errors} errors"
        )
    for title, records in (("open tasks", engine.open_records()), ("last tasks", engine.recent)):
        lines.append(f"{title}: {len(records)}")
        lines += [
            f"  {each.task_id} {each.kind} {each.status}, {each.tokens} tokens,"
            f" {each.seconds:.3f} s"
            for each in list(records)[-most:]
        ]
    return "\n".join(lines)
