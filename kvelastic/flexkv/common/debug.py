"""Lists an engine's open and ended tasks, to find out why a request waits.

print(describe(manager.task_engine))
"""

from __future__ import annotations

from typing import Any

from kvelastic.units import format_size


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
    for title, tasks in (("open tasks", engine.list_open()), ("last tasks", list(engine.recent))):
        lines.append(f"{title}: {len(tasks)}")
        lines += [
            f"  {task.task_id} {task.task_type.value} {task.status.value}, {task.plan.tokens}"
            f" tokens, {engine.seconds_of(task):.3f} s"
            for task in tasks[-most:]
        ]
    return "\n".join(lines)
