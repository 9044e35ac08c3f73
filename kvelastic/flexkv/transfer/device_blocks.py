"""Blocks in a GPU's pages that another process has, imported by descriptor, page by page.

    blocks = DeviceBlocks(span, parts, blocks=1024, find=...)
    blocks.copy_out([3, 7], staging, slots=[0, 1])

Pages come and go in their owner, so none is kept: for each copy the owner is asked for descriptors
of the pages that it touches, which are mapped at their places, copied from or to, and let go of
again. Meanwhile they live, whatever their owner does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from kvelastic import _vmm
from kvelastic.errors import DriverError, InvalidArgumentError
from kvelastic.flexkv.common.memory_handle import Buffer

AT_ONCE: Final = 16
"""Descriptors of one answer."""
PageExporter = Callable[[list[int]], Sequence[int]]
"""Descriptors of pages, by their places in the span; the caller closes them. Blocks; raises
`DriverError` for a page that is not mapped."""


class DeviceSpan(NamedTuple):
    """A range of another process: whose memory, and how its pages lie."""

    device: str
    """The GPU's UUID."""
    page_bytes: int
    pages: int

    @property
    def size_bytes(self) -> int:
        """Of all its addresses."""
        return self.page_bytes * self.pages


class DeviceBlocks:
    """One rank's blocks. Opens the device at its first copy. Any thread may copy, one at a time."""

    def __init__(
        self, span: DeviceSpan, buffers: Sequence[Buffer], blocks: int, find: PageExporter
    ) -> None:
        """`buffers` lie in the span, in the order of a record."""
        if not buffers or blocks < 1:
            raise InvalidArgumentError("blocks without a buffer, or none at all, hold nothing")
        self._span = span
        self._buffers = list(buffers)
        self._count = blocks
        self._find = find
        self._lock = threading.Lock()
        self._driver: _vmm.CudaDriver | None = None
        self._address = 0
        self._is_closed = False

    @property
    def blocks(self) -> int:
        """How many there are."""
        return self._count

    @property
    def record_bytes(self) -> int:
        """Of one block in all its buffers."""
        return sum(buffer.block_bytes for buffer in self._buffers)

    def copy_out(
        self, ids: Sequence[int], staging: Any, slots: Sequence[int], offset_bytes: int = 0
    ) -> None:
        """Blocks to slots, from byte `offset_bytes` of each on.

        Raises `InvalidArgumentError` for a block that is not there, `DriverError` for one without
        memory, and where the device or its owner fails.
        """
        with self._mapped(ids) as here:
            here.copy_out(ids, staging, slots, offset_bytes)

    def copy_in(
        self, staging: Any, slots: Sequence[int], ids: Sequence[int], offset_bytes: int = 0
    ) -> None:
        """The other way round."""
        with self._mapped(ids) as here:
            here.copy_in(staging, slots, ids, offset_bytes)

    def close(self) -> None:
        """Give the addresses back, after a copy that runs. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            if self._driver is not None and self._address:
                self._driver.release(self._address, self._span.size_bytes)
            self._address = 0

    @contextmanager
    def _mapped(self, ids: Sequence[int]) -> Iterator[_vmm.EngineBlocks]:
        """The blocks as this process sees them, while the pages of `ids` are mapped."""
        pages = self._pages_of(ids)
        with self._lock:
            if self._is_closed:
                raise DriverError("the process that registered these blocks has gone")
            driver = self._open()
            mapped: list[tuple[int, int]] = []
            try:
                for first in range(0, len(pages), AT_ONCE):
                    self._map(driver, pages[first : first + AT_ONCE], mapped)
                parts = [
                    (
                        self._address + one.offset,
                        one.stride_bytes,
                        one.block_bytes,
                        1,
                        one.block_bytes,
                    )
                    for one in self._buffers
                ]
                yield _vmm.EngineBlocks(driver, parts, self._count)
            finally:
                for page, handle in mapped:
                    driver.unmap(
                        self._address + page * self._span.page_bytes, self._span.page_bytes
                    )
                    driver.destroy(handle, self._span.page_bytes)

    def _pages_of(self, ids: Sequence[int]) -> list[int]:
        pages: set[int] = set()
        for block in ids:
            if not 0 <= block < self._count:
                raise InvalidArgumentError(f"block {block} is none of {self._count}")
            for one in self._buffers:
                first = one.offset + block * one.stride_bytes
                last = first + one.block_bytes - 1
                page_bytes = self._span.page_bytes
                pages.update(range(first // page_bytes, last // page_bytes + 1))
        return sorted(pages)

    def _open(self) -> _vmm.CudaDriver:
        if self._driver is None:
            driver = _vmm.CudaDriver(self._span.device)
            driver.use_streams([])  # copies are waited for, and nothing else computes here
            self._driver = driver
        if not self._address:
            self._address = self._driver.reserve(self._span.size_bytes)
        return self._driver

    def _map(
        self, driver: _vmm.CudaDriver, pages: list[int], mapped: list[tuple[int, int]]
    ) -> None:
        page_bytes = self._span.page_bytes
        descriptors = list(self._find(pages))
        try:
            for page, fd in zip(pages, descriptors, strict=True):
                handle = driver.import_page(fd)
                try:
                    driver.map(self._address + page * page_bytes, page_bytes, handle)
                except BaseException:
                    driver.destroy(handle, page_bytes)
                    raise
                mapped.append((page, handle))
                driver.set_access(self._address + page * page_bytes, page_bytes)
        finally:
            for fd in descriptors:
                os.close(fd)
