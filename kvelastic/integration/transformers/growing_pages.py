"""Contiguous pages of a pool, from the first one on: memory for data that grows at its end.

    pages = open_growing_pages(settings, device, engine="transformers", lanes=1)
    pages.grow(3)          # pages 0, 1 and 2 are mapped, at contiguous addresses
    pages.shrink(1)        # pages 1 and 2 are parked; the maintenance thread unmaps them
    pages.close()

A pool allocates blocks on the page that suits it best. This module takes whole pages, and always
the next one, so that the addresses in use are contiguous. The pool does the rest: limits, the
ledger, sleep, reclaim. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final
from weakref import WeakValueDictionary

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.device.selection import Device
from kvelastic.errors import (
    DeviceUnavailableError,
    DoubleFreeError,
    DriverError,
    LimitReachedError,
    OutOfMemoryError,
    PoolFailedError,
    SegmentError,
    SegmentExistsError,
)
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import RESERVE_WAIT_S, ElasticPool, local_range, open_pool
from kvelastic.shared import device_set, segment
from kvelastic.units import format_size

_BLOCKS_A_PAGE: Final = 64
"""Block 0 of page 0 is the null block, so a 64th of a page is lost."""
_LEAST_WAIT_S: Final = RESERVE_WAIT_S
"""Minimum wait for other instances' memory, as long as a reserve waits. `generate` cannot preempt
requests instead."""
_WAITED_AT_ONCE_S: Final = 0.25
"""Maximum length of one wait, so that Ctrl-C takes effect."""
_TRIES: Final = 4
_MOST_NAMES: Final = 1000

_reserving: WeakValueDictionary[str, GrowingPages] = WeakValueDictionary()
"""By device, the open pages whose instance reports `KVELASTIC_RESERVE`. The reserve is of the whole
process, so only one instance on a device reports it. After its close, the next new instance does.
"""


class GrowingPages:
    """Contiguous pages, numbered from 0; see `open_growing_pages`. One thread at a time."""

    def __init__(self, pool: ElasticPool, device: Device, pages: int, wait_s: float) -> None:
        self.pool = pool
        self._device = device
        self._wait_s = wait_s
        self.held = 0
        """Number of pages in use: pages 0 to held - 1."""
        self._most = pages
        self._pid = os.getpid()

    @property
    def geometry(self) -> _vmm.Geometry:
        """The sizes of its pages: an extent in each lane, of which the first block is unused."""
        return self.pool.blocks.geometry

    def refuse_in_a_child(self) -> None:
        """Raise `DeviceUnavailableError` in a forked child: the memory belongs to the parent."""
        if os.getpid() != self._pid:
            raise DeviceUnavailableError(
                f"{self.pool.name} was made by process {self._pid}, and this is a forked child"
                " of it; make another one here"
            )

    def grow(self, pages: int) -> None:
        """Grow to at least `pages` pages, or change nothing.

        Waits up to 5 s for memory of other instances, or `KVELASTIC_RECLAIM_WAIT` if that is
        longer. Raises `LimitReachedError` if the limit is too low or the instance sleeps,
        `OutOfMemoryError` if the device has no memory, and `PoolFailedError`.
        """
        if pages <= self.held:
            return
        self._free_lost()
        wanted = self._ids(self.held, pages)
        for _ in range(_TRIES):
            ids = self._alloc(len(wanted), pages)
            if min(ids) == wanted[0] and max(ids) == wanted[-1]:
                self.held = pages
                return
            # The pool may choose any parked page, but always the lowest unmapped one.
            self.pool.blocks.free(ids)
            self.pool.blocks.trim()
        raise PoolFailedError(
            f"{self.pool.name} was not given page {self.held} in {_TRIES} tries; please report it"
        )

    def shrink(self, pages: int, *, trim: bool = False) -> None:
        """Shrink to at most `pages` pages. The others are parked, or unmapped with `trim`.

        Parked pages are unmapped when other instances request memory, over a lower limit, or after
        `KVELASTIC_IDLE_TRIM_SECONDS`. The first page stays mapped. With `trim` the call blocks
        until pages are unmapped.
        """
        if pages < self.held:
            # Free from the end, so that the pool reuses the lowest parked pages first.
            freed = list(reversed(self._ids(pages, self.held)))
            self.held = pages
            self.pool.blocks.free(freed)
        self._free_lost()
        if trim:
            self.pool.blocks.trim()

    def close(self, *, is_unused: bool) -> None:
        """Remove the instance from ledger and segment. Idempotent; blocks for the driver.

        `is_unused`: no tensor over the pages exists. Otherwise the pages and their grant stay until
        the last tensor is deleted. In a forked child the call does nothing.
        """
        if os.getpid() != self._pid:
            return
        if is_unused:
            with suppress(DriverError):  # nothing can be released after a driver error
                self.shrink(0)
        self.pool.close()
        if _reserving.get(self._device.name) is self:
            del _reserving[self._device.name]

    def _free_lost(self) -> None:
        """Free used blocks that are not held: Ctrl-C has ended a call before it could note them."""
        blocks = self.pool.blocks
        if blocks.stats()["blocks_used"] == len(self._ids(0, self.held)):
            return
        for page, count in blocks.occupancy().items():
            if page >= self.held and count:
                for block in reversed(self._ids(page, page + 1)):
                    with suppress(DoubleFreeError):
                        blocks.free([block])

    def _alloc(self, count: int, pages: int) -> list[int]:
        """Return `count` blocks for a total of `pages` pages. Waits and raises like `grow`."""
        blocks = self.pool.blocks
        deadline_s = time.monotonic() + self._wait_s
        while True:
            seen = blocks.availability_epoch
            ids = blocks.alloc(count) if pages <= self._most else None
            if ids is not None:
                return ids
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._is_over_limit(pages):
                refusal = self._refusal(pages)
                blocks.trim()  # release pages that became available but do not suffice
                raise refusal
            blocks.wait_for_epoch(seen, min(left_s, _WAITED_AT_ONCE_S))

    def _is_over_limit(self, pages: int) -> bool:
        effective_bytes = self.pool.blocks.limit_state()["effective_limit_bytes"]
        return pages > self._most or pages * self.geometry.page_bytes > effective_bytes

    def _ids(self, begin: int, end: int) -> Sequence[int]:
        """Return the block ids of pages `begin` to `end`, without the null block."""
        return range(max(1, begin * _BLOCKS_A_PAGE), end * _BLOCKS_A_PAGE)

    def _refusal(self, pages: int) -> Exception:
        """Return the error for unavailable pages, with the memory held and the remedy."""
        blocks, name = self.pool.blocks, self.pool.name
        state = blocks.limit_state()
        page_bytes = self.geometry.page_bytes
        needed_bytes = pages * page_bytes
        held = format_size(state["mapped_bytes"])
        now = f"{name} needs {format_size(needed_bytes)} and holds {held}"
        after = "Nothing has changed: it may go on when there is room, or be closed."
        if blocks.is_asleep:
            return LimitReachedError(
                f"{now}, and it is asleep, so it gets no memory. Wake it with `kvctl wake"
                f" {name}`. {after}"
            )
        effective_bytes = state["effective_limit_bytes"]
        capacity_bytes = self.pool.device_set.capacity_bytes
        limit_bytes = min(state["limit_bytes"], capacity_bytes)
        if not self._is_over_limit(pages):
            return OutOfMemoryError(
                f"{now}; more is not available of the {format_size(capacity_bytes)} that instances"
                " may hold of the device: `kvctl devices` lists the holders. Lower another"
                f" instance's limit, or wait longer with KVELASTIC_RECLAIM_WAIT. {after}"
            )
        if limit_bytes - effective_bytes >= page_bytes and pages <= self._most:
            return LimitReachedError(
                f"{now}; it keeps to {format_size(effective_bytes)} for the moment, less than its"
                f" limit of {format_size(limit_bytes)}, because others are owed memory or the"
                f" machine has too little left. {after}"
            )
        return LimitReachedError(
            f"{now}; its limit is {format_size(limit_bytes)}. Raise it with `kvctl limit {name}"
            f" SIZE` (at most {format_size(capacity_bytes)} on this device), or"
            f" generate shorter or fewer sequences. {after}"
        )


def open_growing_pages(
    settings: Config, device: Device, *, engine: str, lanes: int, model: str = "", name: str | None
) -> GrowingPages:
    """Make a pool, its segment and its maintenance thread; map nothing yet.

    The range has addresses for the whole capacity of the device. With several `lanes` a page has
    an extent in each lane. `name` is used unchanged. If it is None, the name is
    `KVELASTIC_IPC_NAME`, with a number appended if another instance of this process has it, or an
    automatic name. Raises the errors of `open_pool`.
    """
    extent_bytes = device_set.page_size_bytes(settings, [device])
    layout = PageLayout(
        block_bytes=extent_bytes // _BLOCKS_A_PAGE,
        buffers=lanes,
        blocks_per_page=_BLOCKS_A_PAGE,
        extent_bytes=extent_bytes,
        per_buffer=lanes > 1,
    )
    pages = max(1, device.capacity_bytes // layout.page_bytes)
    reserves = device.name not in _reserving
    # Preallocated pages would not be in the order of addresses.
    settings = dataclasses.replace(settings, page_prealloc_enabled=False)

    def open_named(name: str | None) -> ElasticPool:
        return open_pool(
            settings,
            layout,
            pages,
            num_blocks=pages * _BLOCKS_A_PAGE,
            block_tokens=1,
            engine=engine,
            model=model,
            devices=[device],
            memory=local_range(device, guard_pages=settings.guard_pages),
            reserve_bytes=(settings.reserve or 0) if reserves else 0,
            name=name,
        )

    pool = open_named(name) if name is not None else _open_by_settings(settings, open_named)
    pool.start_maintenance()
    made = GrowingPages(pool, device, pages, max(settings.reclaim_wait_s, _LEAST_WAIT_S))
    if reserves:
        _reserving[device.name] = made
    return made


def _open_by_settings(
    settings: Config, open_named: Callable[[str | None], ElasticPool]
) -> ElasticPool:
    """Open a pool named by `KVELASTIC_IPC_NAME`, numbered from the process's second instance on."""
    first = settings.ipc_name
    if first is None:
        return open_named(None)
    for number in range(1, _MOST_NAMES):
        name = first if number == 1 else f"{first}_{number}"
        try:
            return open_named(name)
        except SegmentExistsError:
            if not _is_own(name):
                raise
    raise SegmentExistsError(f"this process has {_MOST_NAMES - 1} instances named {first} already")


def _is_own(name: str) -> bool:
    """Return True if the instance of that name belongs to this process."""
    try:
        return bool(segment.inspect(name).header.get("pid") == os.getpid())
    except SegmentError:
        return False
