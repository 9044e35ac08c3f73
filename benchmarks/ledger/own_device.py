"""A device of a benchmark's own: a ledger that no other instance joins, and nothing left of it.

with OwnDevice(capacity_bytes=1 << 30) as device:
    member = device.join("taker-1").member
    device.granted()                       # bytes of each member, by name
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from typing import Any

from kvelastic import _vmm
from kvelastic.shared import ledger, segment

DEVICE = "host"


class OwnDevice:
    """The ledger of a group named by this process's id."""

    def __init__(self, capacity_bytes: int, label: str = "grants") -> None:
        self.group = f"bench-{label}-{os.getpid()}"
        self.capacity_bytes = capacity_bytes
        self._stack = ExitStack()
        self._view: mmap.mmap | None = None

    def join(self, name: str) -> ledger.JoinedLedger:
        """A member of this process; it leaves when the device is closed."""
        return self._stack.enter_context(join(self.group, self.capacity_bytes, name))

    @property
    def settings(self) -> dict[str, str]:
        """The variables of an instance that shares this device."""
        return {
            "KVELASTIC_LEDGER": self.group,
            "KVELASTIC_HOST_MEMORY": str(self.capacity_bytes),
            "KVELASTIC_DEVICE": DEVICE,
        }

    def granted(self) -> dict[str, int]:
        """Bytes of each member, as anybody may look them up; about 10 us. Needs a member."""
        if self._view is None:
            with ledger.ledger_path(self.group, DEVICE).open("rb") as file:
                self._view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        members: list[dict[str, Any]] = _vmm.read_ledger(self._view)["members"]
        return {member["name"]: member["granted_bytes"] for member in members}

    def idle_s(self, pid: int) -> float:
        """How long an instance has not allocated or freed."""
        return idle_s(self.group, pid)

    def __enter__(self) -> OwnDevice:
        return self

    def __exit__(self, *_: object) -> None:
        if self._view is not None:
            self._view.close()
        self._stack.close()
        ledger.reap()
        segment.reap()
        left = ledger.ledger_path(self.group, DEVICE)
        assert not left.exists(), f"{left} is left behind"


def idle_s(group: str, pid: int) -> float:
    """How long an instance of this group, on whatever device, has not allocated or freed."""
    for info in ledger.list_ledgers():
        for member in info.members:
            if info.group == group and member.pid == pid:
                return member.idle_s
    raise LookupError(f"no instance {pid} in {group}")


def join(group: str, capacity_bytes: int, name: str) -> ledger.JoinedLedger:
    """A member that has no pool."""
    return ledger.join(
        DEVICE, group=group, capacity_bytes=capacity_bytes, name=name, uuid=os.urandom(16)
    )
