"""The pages of a pool from the first one on: memory for something that grows at its end.

    pages = open_growing_pages(settings, device, engine="transformers", lanes=1)
    pages.grow(3)          # pages 0, 1 and 2 are mapped, so their addresses follow on one another
    pages.shrink(1)        # pages 1 and 2 are parked; the keeper gives them back
    pages.close()

A pool hands out blocks of whichever page is best for it. Here a page is taken whole, and always the
next one, so that the addresses in use are one run. All else is the pool's: limits, the ledger,
sleep, what others ask. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvelastic import _vmm, places, segment
from kvelastic.config import Config
from kvelastic.device import Device
from kvelastic.errors import (
    DeviceUnavailableError,
    DriverError,
    LimitReachedError,
    OutOfMemoryError,
    PoolFailedError,
    SegmentError,
    SegmentExistsError,
)
from kvelastic.layout import PageLayout
from kvelastic.pool import ElasticPool, local_range, open_pool
from kvelastic.sizes import format_size

_BLOCKS_A_PAGE: Final = 64
"""Of which the first one of page 0 is the null block, so a 64th of a page is lost to it."""
_LEAST_WAIT_S: Final = _vmm.RECLAIM_RESERVE_WAIT_NS / 1e9
"""For memory of others: as long as a reserve waits. Who runs here cannot preempt anything."""
_WAITED_AT_ONCE_S: Final = 0.25
"""So that Ctrl-C is heard."""
_TRIES: Final = 4
_MOST_NAMES: Final = 1000

_reserving: weakref.ref[GrowingPages] | None = None
"""Whose instance says `KVELASTIC_RESERVE`: one of this process, for it is of the whole process."""


class GrowingPages:
    """What `open_growing_pages` made. One thread at a time; pages count from 0."""

    def __init__(self, pool: ElasticPool, pages: int, wait_s: float) -> None:
        self.pool = pool
        self._wait_s = wait_s
        self.held = 0
        """Pages in use: 0 to held - 1."""
        self._most = pages
        self._pid = os.getpid()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all lanes together."""
        return self.pool.blocks.geometry.page_bytes

    @property
    def extent_bytes(self) -> int:
        """Bytes of a page in one lane."""
        return self.pool.blocks.geometry.extent_bytes

    @property
    def lane_stride_bytes(self) -> int:
        """Bytes from a lane to the next one."""
        return self.pool.blocks.geometry.extent_stride_bytes

    @property
    def unused_bytes(self) -> int:
        """At the start of each lane, the null block."""
        return self.pool.blocks.geometry.block_bytes

    @property
    def range_memory(self) -> _vmm.Range:
        """The addresses."""
        assert isinstance(self.pool.memory, _vmm.Range)
        return self.pool.memory

    def refuse_in_a_child(self) -> None:
        """Raise `DeviceUnavailableError` in a forked child: the memory is its parent's."""
        if os.getpid() != self._pid:
            raise DeviceUnavailableError(
                f"{self.pool.name} was made by process {self._pid}, and this is a forked child"
                " of it; make another one here"
            )

    def grow(self, pages: int) -> None:
        """Have at least so many pages in use. All or nothing.

        Waits for memory of other instances, five seconds at most (or `KVELASTIC_RECLAIM_WAIT`,
        where that is longer). Raises `LimitReachedError` where the limit or sleep has no room,
        `OutOfMemoryError` where the device has none, `PoolFailedError`.
        """
        if pages <= self.held:
            return
        wanted = self._ids(self.held, pages)
        for _ in range(_TRIES):
            ids = self._alloc(len(wanted), pages)
            if min(ids) == wanted[0] and max(ids) == wanted[-1]:
                self.held = pages
                return
            # Of several parked pages the pool gives the one it likes; of unmapped ones the lowest.
            self.pool.blocks.free(ids)
            self.pool.blocks.trim()
        raise PoolFailedError(
            f"{self.pool.name} was not given page {self.held} in {_TRIES} tries; please report it"
        )

    def shrink(self, pages: int, *, trim: bool = False) -> None:
        """Have at most so many pages in use; the others are parked, or given back with `trim`.

        Parked pages go when others ask, over a lower limit, or after `KVELASTIC_IDLE_TRIM_SECONDS`.
        The first page stays mapped. With `trim` it waits for the unmapping.
        """
        if pages < self.held:
            # The last first, so that of the parked ones the pool gives the lowest again first.
            self.pool.blocks.free(list(reversed(self._ids(pages, self.held))))
            self.held = pages
        if trim:
            self.pool.blocks.trim()

    def close(self, *, is_unused: bool) -> None:
        """Leave ledger and segment; `is_unused`: no tensor over the pages is left.

        Else the pages stay, and what is granted for them, until the last one is gone. In a forked
        child nothing happens. Waits for the driver. Repeatable.
        """
        if os.getpid() != self._pid:
            return
        if is_unused:
            with suppress(DriverError):  # what has failed stays as it is
                self.shrink(0)
        self.pool.close()

    def _alloc(self, count: int, pages: int) -> list[int]:
        """So many blocks, for so many pages in all; waits and raises as `grow`."""
        blocks = self.pool.blocks
        deadline_s = time.monotonic() + self._wait_s
        while True:
            seen = blocks.arrivals
            ids = blocks.alloc(count) if pages <= self._most else None
            if ids is not None:
                return ids
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._is_over_limit(pages):
                refusal = self._refusal(pages)
                blocks.trim()  # what came meanwhile is of no use here
                raise refusal
            blocks.wait_for_arrival(seen, min(left_s, _WAITED_AT_ONCE_S))

    def _is_over_limit(self, pages: int) -> bool:
        effective_bytes = self.pool.blocks.limit_state()["effective_limit_bytes"]
        return pages > self._most or pages * self.page_bytes > effective_bytes

    def _ids(self, begin: int, end: int) -> Sequence[int]:
        """The ids of pages `begin` to `end`, without the null block."""
        return range(max(1, begin * _BLOCKS_A_PAGE), end * _BLOCKS_A_PAGE)

    def _refusal(self, pages: int) -> Exception:
        """Why so many pages cannot be had, with what is held and what to do."""
        blocks, name = self.pool.blocks, self.pool.name
        state = blocks.limit_state()
        needed_bytes = pages * self.page_bytes
        held = format_size(state["mapped_bytes"])
        now = f"{name} needs {format_size(needed_bytes)} and holds {held}"
        after = "Nothing has changed: it may go on when there is room, or be closed."
        if blocks.is_asleep:
            return LimitReachedError(
                f"{now}, and it is asleep, so it gets no memory. Wake it with `kvctl wake"
                f" {name}`. {after}"
            )
        effective_bytes = state["effective_limit_bytes"]
        limit_bytes = min(state["limit_bytes"], self.pool.places.capacity_bytes)
        if not self._is_over_limit(pages):
            return OutOfMemoryError(
                f"{now}; more is not available of the"
                f" {format_size(self.pool.places.capacity_bytes)} that instances may hold of the"
                " device: `kvctl devices` says who has them. Lower another instance's limit, or"
                f" wait longer with KVELASTIC_RECLAIM_WAIT. {after}"
            )
        if limit_bytes - effective_bytes >= self.page_bytes and pages <= self._most:
            return LimitReachedError(
                f"{now}; it keeps to {format_size(effective_bytes)} for the moment, less than its"
                f" limit of {format_size(limit_bytes)}, because others are owed memory or the"
                f" machine has too little left. {after}"
            )
        return LimitReachedError(
            f"{now}; its limit is {format_size(limit_bytes)}. Raise it with `kvctl limit {name}"
            f" SIZE` (at most {format_size(self.pool.places.capacity_bytes)} on this device), or"
            f" generate shorter or fewer sequences. {after}"
        )


def open_growing_pages(
    settings: Config, device: Device, *, engine: str, lanes: int, model: str = "", name: str | None
) -> GrowingPages:
    """Make a pool, its segment and its keeper; maps nothing yet.

    There are addresses for the whole capacity of the device. With several `lanes` a page has an
    extent in each of them. `name` is taken exactly; without one it is `KVELASTIC_IPC_NAME`, with a
    number behind it where another instance of this process has that, or an automatic name. Raises
    as `open_pool`.
    """
    global _reserving
    extent_bytes = places.page_size_bytes(settings, [device])
    layout = PageLayout(
        block_bytes=extent_bytes // _BLOCKS_A_PAGE,
        buffers=lanes,
        blocks_per_page=_BLOCKS_A_PAGE,
        extent_bytes=extent_bytes,
        per_buffer=lanes > 1,
    )
    pages = max(1, device.capacity_bytes // layout.page_bytes)
    reserves = _reserving is None or _reserving() is None
    # Pages that the keeper maps ahead would come in another order than that of the addresses.
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
    try:
        pool.start_keeper()
    except BaseException:
        pool.close()
        raise
    made = GrowingPages(pool, pages, max(settings.reclaim_wait_s, _LEAST_WAIT_S))
    if reserves:
        _reserving = weakref.ref(made)
    return made


def _open_by_settings(
    settings: Config, open_named: Callable[[str | None], ElasticPool]
) -> ElasticPool:
    """Open it by `KVELASTIC_IPC_NAME`, which only the first instance of a process can have."""
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
    """Whether this very process has the instance of that name."""
    try:
        return bool(segment.inspect(name).header.get("pid") == os.getpid())
    except SegmentError:
        return False
