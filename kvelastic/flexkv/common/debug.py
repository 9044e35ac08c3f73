"""What a task engine holds and has done, for a person who asks why a request waits.

print(describe(manager.task_engine))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvelastic.flexkv.common.transfer import DeviceType
from kvelastic.sizes import format_size
from kvelastic.tiers.base import Store


@dataclass(frozen=True)
class TaskRecord:
    """One task in short."""

    task_id: int
    kind: str
    status: str
    tokens: int
    seconds: float
    """Since it was matched; of one that is over, until then."""


class Described(Protocol):
    """As much of a task engine as this needs."""

    def open_records(self) -> Sequence[TaskRecord]:
        """Tasks that hold anything, or are on their way."""

    def recent_records(self) -> Sequence[TaskRecord]:
        """The last ones that are over."""

    def tier_stores(self) -> Mapping[DeviceType, Store]:
        """Nearest first."""

    @property
    def stuck_devices(self) -> Sequence[DeviceType]:
        """Tiers that do not answer."""


def describe(engine: Described, most: int = 20) -> str:
    """Tiers, open tasks, the last ones that are over, in lines. Asks stores, which may block."""
    lines = ["tiers:"]
    stuck = set(engine.stuck_devices)
    for device, store in engine.tier_stores().items():
        if device in stuck:
            lines.append(f"  {device.name}: does not answer")
            continue
        capacity, done = store.capacity(), store.statistics()
        lines.append(
            f"  {device.name}: {capacity.records} blocks, {format_size(capacity.used_bytes)};"
            f" {done.puts} put, {done.refused} refused, {done.hits} read, {done.misses} missed,"
            f" {done.evicted} evicted, {done.errors} errors"
        )
    for title, records in (
        ("open tasks", engine.open_records()),
        ("last tasks", engine.recent_records()),
    ):
        lines.append(f"{title}: {len(records)}")
        lines += [
            f"  {each.task_id} {each.kind} {each.status}, {each.tokens} tokens,"
            f" {each.seconds:.3f} s"
            for each in list(records)[-most:]
        ]
    return "\n".join(lines)
