"""Native ranges and pools small enough for tests, and what the operating system says they hold.

memory = Memory(LAYOUTS["paged"], pages=6)
pool = memory.pool()
memory.write(alloc(pool, 1)[0], 7)
"""

from __future__ import annotations

import ctypes
import os
from typing import Protocol

from open_memfds import open_memfds

from kvelastic import _vmm
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import native_geometry

MIB = 1 << 20
HUGE = 2 * MIB
LAYOUTS = {
    "paged": PageLayout(block_bytes=64 << 10, buffers=4, blocks_per_page=8, extent_bytes=HUGE),
    "block that divides no page": PageLayout(24 << 10, 5, 16, HUGE),
    "one block a page": PageLayout(MIB, 2, 1, HUGE),
    "two words of blocks": PageLayout(14 << 10, 2, 70, HUGE),
    "per buffer": PageLayout(256 << 10, 3, 8, HUGE, per_buffer=True),
}


class Allocates(Protocol):
    """A pool, or a manager of kvcached's interface."""

    def alloc(self, count: int, /) -> list[int] | None: ...


def alloc(pool: Allocates, count: int) -> list[int]:
    """Blocks of a pool that must have that many."""
    ids = pool.alloc(count)
    assert ids is not None
    return ids


def evicted(pool: _vmm.Pool) -> list[int]:
    """Blocks evicted since the last look at a pool that moves none."""
    changes = pool.take_changes()
    assert all(to < 0 for _, to in changes)
    return [block for block, _ in changes]


class Memory:
    """A range of `pages` pages on a host driver of its own, behind a driver that can fail."""

    def __init__(self, layout: PageLayout, pages: int) -> None:
        before = open_memfds()
        self.host = _vmm.HostDriver()
        (self.memfd,) = (fd for inode, fd in open_memfds().items() if inode not in before)
        self.driver = _vmm.FaultDriver(self.host)
        self.layout = layout
        self.pages = pages
        self.range = _vmm.Range.reserve(self.driver, native_geometry(layout, pages))

    def pool(self, **options: int | bool) -> _vmm.Pool:
        """A pool over the range, that maps nothing ahead of demand unless told so."""
        total = self.pages * self.layout.page_bytes
        chosen = {
            "max_blocks": self.pages * self.layout.blocks_per_page,
            "limit_bytes": total,
            "capacity_bytes": total,
            "preallocate": False,
        } | options
        return _vmm.Pool(self.range, **chosen)  # type: ignore[arg-type]

    def held_at_the_os(self) -> int:
        """Bytes of memory behind the driver's file."""
        return self.memfd.stat().st_blocks * 512

    def give_up(self) -> None:
        """Return the pages that a failed range keeps until the process ends."""
        assert self.range.failed
        os.truncate(self.memfd, 0)

    def page_of(self, block: int) -> int:
        return self.layout.page_of(block)

    def places(self, block: int) -> list[int]:
        """Addresses of the first and the last byte of a block in every buffer."""
        found = []
        for buffer in range(self.layout.buffers):
            at = self.range.address + self.layout.offset_bytes(block, buffer, self.pages)
            found += [at, at + self.layout.block_bytes - 1]
        return found

    def write(self, block: int, tag: int) -> None:
        for at in self.places(block):
            ctypes.memset(at, tag, 1)

    def read(self, block: int) -> set[int]:
        """What the block holds: one value if nobody else wrote into it."""
        return {ctypes.string_at(at, 1)[0] for at in self.places(block)}
