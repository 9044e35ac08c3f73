"""A device of a test's own: the host, in a group of instances of its own.

with Device(KVELASTIC_RECLAIM_WAIT="0") as device:
    high, low = device.start(KVELASTIC_PRIORITY="5"), device.start()
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ledger_instance import PAGE_BYTES, Instance
from waiting import wait_until

from kvelastic import _vmm
from kvelastic.shared import ledger, segment

DEVICE_PAGES = 32


class Device:
    """No page of its instances is mapped but for an alloc. `settings` are of each of them."""

    def __init__(self, **settings: str) -> None:
        self.group = f"test-{os.getpid()}-{random.randrange(1 << 32):x}"
        self._stack = ExitStack()
        self._settings = {
            "KVELASTIC_LEDGER": self.group,
            "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
            "KVELASTIC_MAX_CACHED_TOKENS": "-1",
            **settings,
        }

    def start(self, pages: int = DEVICE_PAGES, **settings: str) -> Instance:
        """An instance that takes the device for so large."""
        capacity = {"KVELASTIC_HOST_MEMORY": str(pages * PAGE_BYTES)}
        return self._stack.enter_context(Instance(**self._settings | capacity | settings))

    @property
    def path(self) -> Path:
        return ledger.ledger_path(self.group, "host")

    def set_pages(self, pages: int) -> int:
        """Set the capacity; returns what it was, in pages."""
        before = ledger.set_capacity("host", group=self.group, capacity_bytes=pages * PAGE_BYTES)
        return before // PAGE_BYTES

    def look(self) -> ledger.LedgerInfo:
        (info,) = [info for info in ledger.list_ledgers() if info.group == self.group]
        return info

    def held(self) -> int:
        """Pages that all have."""
        return self.look().granted_bytes // PAGE_BYTES

    def member(self, of: Instance) -> ledger.Member:
        (member,) = [member for member in self.look().members if member.pid == of.pid]
        return member

    def pages(self, of: Instance) -> int:
        """Granted, as all others see it."""
        return self.member(of).granted_bytes // PAGE_BYTES

    @contextmanager
    def requester(self) -> Iterator[_vmm.LedgerMember]:
        """A member without pages and maintenance thread: only the test acts for it."""
        joined = ledger.join(
            "host",
            group=self.group,
            capacity_bytes=DEVICE_PAGES * PAGE_BYTES,
            name="requester",
            uuid=os.urandom(16),
        )
        try:
            yield joined.member
        finally:
            joined.close()

    def wait_until_idle(self, of: Instance) -> None:
        wait_until(lambda: self.member(of).idle_s > 0.6, "it never gets idle")

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        ledger.reap()
        segment.reap()
        assert not self.path.exists()
