"""Blocks in memory of another process, copied to and from staging.

    blocks = SharedBlocks([(fd, buffer), ...], blocks=1024)
    blocks.copy_out([3, 7], staging, slots=[0, 1])          # each block's buffers, concatenated

Host memory is read and written through its descriptor, not mapped. If its owner truncated it, a
mapping would end this process with SIGBUS, while a short read only fails that copy.

A GPU's pages are mapped and unmapped by their owner. A page is imported at its first copy and stays
mapped here, at its offset, until the owner reports that it has unmapped it. Before each copy the
owner confirms by the page's generation that it is still the same one.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, NamedTuple

from kvelastic import _vmm
from kvelastic.errors import DriverError, InvalidArgumentError
from kvelastic.flexkv.common.memory_handle import Buffer
from kvelastic.flexkv.common.process_mappings import NOT_MAPPED, PAGE_BYTES
from kvelastic.messages import Meta
from kvelastic.tiers.workers import Workers

_log = logging.getLogger("kvelastic.flexkv")
_MOST_AT_ONCE: Final = 1024
"""Maximum pages in one request to their owner."""
NOT_IMPORTED: Final = -1
MOST_KEPT_BYTES: Final = 4 << 30
"""Pages of one rank that are kept between copies; the least recently used are released.

A bound, because a page stays allocated while it is imported: if this process is stopped, it cannot
release pages that their owner has unmapped.
"""
PageFinder = Callable[[list[int], list[int]], tuple[Sequence[int], Sequence[int]]]
"""Asks an owner for pages. Blocks.

Of host memory, pages are given in units of `PAGE_BYTES` (`process_mappings`), without generations.
Returns their offsets in the file, and no descriptors.

Of a GPU, pages are given by their indices in a span and their known generations or `NOT_IMPORTED`.
Returns their generations, and descriptors of the first pages whose generation differs, at least one
if any does; the caller closes them.
"""
_Transfer = Callable[[int, Sequence[memoryview], int], int]


class ForeignBlocks(ABC):
    """One rank's blocks: the buffers of each, in the order of a record. Any thread may copy."""

    def __init__(self, buffers: Sequence[Buffer], blocks: int) -> None:
        if not buffers or blocks < 1:
            raise InvalidArgumentError("blocks without a buffer, or none at all, hold nothing")
        self.blocks: Final = blocks
        self.record_bytes: Final = sum(buffer.block_bytes for buffer in buffers)

    def copy_out(
        self, ids: Sequence[int], staging: Any, slots: Sequence[int], offset_bytes: int = 0
    ) -> None:
        """Copy blocks to slots, from byte `offset_bytes` of each on. Blocks.

        Raises `InvalidArgumentError` for an unknown block, before anything is copied. Raises
        `DriverError` for a block without memory, and if the device or the owner fails.
        """
        self._check(ids)
        self._copy(ids, staging, slots, offset_bytes, is_out=True)

    def copy_in(
        self, staging: Any, slots: Sequence[int], ids: Sequence[int], offset_bytes: int = 0
    ) -> None:
        """Copy slots to blocks. Arguments and errors as in `copy_out`."""
        self._check(ids)
        self._copy(ids, staging, slots, offset_bytes, is_out=False)

    def _check(self, ids: Sequence[int]) -> None:
        for block in ids:
            if not 0 <= block < self.blocks:
                raise InvalidArgumentError(f"block {block} is none of {self.blocks}")

    @abstractmethod
    def _copy(
        self, ids: Sequence[int], staging: Any, slots: Sequence[int], at: int, *, is_out: bool
    ) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Refuse copies, and release the memory after a copy in progress. Idempotent."""


def _pages_of(buffers: Sequence[Buffer], ids: Sequence[int], page_bytes: int) -> list[int]:
    pages: set[int] = set()
    for buffer in buffers:
        for block in ids:
            first = buffer.offset + block * buffer.stride_bytes
            last = first + buffer.block_bytes - 1
            pages.update(range(first // page_bytes, last // page_bytes + 1))
    return sorted(pages)


def _requests(pages: list[int]) -> list[list[int]]:
    return [pages[first : first + _MOST_AT_ONCE] for first in range(0, len(pages), _MOST_AT_ONCE)]


class _Descriptors:
    """Descriptors that are closed with the last reference.

    Another file could get a closed descriptor's number while a copy still uses it.
    """

    def __init__(self, fds: Iterable[int]) -> None:
        self._fds = set(fds)

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)


_GONE: Final = "the process that registered these blocks has gone"


class SharedBlocks(ForeignBlocks):
    """Blocks in files. Owns its descriptors until `close`. Copies block; any thread may copy."""

    def __init__(
        self,
        buffers: Sequence[tuple[int, Buffer]],
        blocks: int,
        *,
        owned: Sequence[int] | None = None,
        elastic: Mapping[int, PageFinder] | None = None,
    ) -> None:
        """`buffers` are pairs of a descriptor and a buffer there, in the order of a record.

        `owned` are the descriptors to close; the default is those of `buffers`. In descriptors
        listed in `elastic`, an offset is an address in the owner, which reports the pages' file
        offsets for each copy.
        """
        super().__init__([buffer for _, buffer in buffers], blocks)
        self._buffers = _joined(buffers)
        self._elastic = elastic or {}
        fds = owned if owned is not None else (fd for fd, _ in buffers)
        self._owned: _Descriptors | None = _Descriptors(fds)

    def close(self) -> None:
        """Refuse copies; the last running one closes the descriptors. Idempotent."""
        self._owned = None

    def _copy(
        self, ids: Sequence[int], staging: Any, slots: Sequence[int], at: int, *, is_out: bool
    ) -> None:
        in_use = self._owned
        if in_use is None:
            raise DriverError(_GONE)
        transfer = os.preadv if is_out else os.pwritev
        pages = {fd: self._locate(fd, ids) for fd in self._elastic}
        for block, slot in zip(ids, slots, strict=True):
            record = staging.view(slot)
            done = at
            for fd, buffer in self._buffers:
                piece = record[done : done + buffer.block_bytes]
                offset = buffer.offset + block * buffer.stride_bytes
                _move(transfer, fd, piece, offset, pages.get(fd))
                done += buffer.block_bytes

    def _locate(self, elastic: int, ids: Sequence[int]) -> dict[int, int]:
        """Return the offset of each page in the file of an elastic memory."""
        pages = _pages_of([one for fd, one in self._buffers if fd == elastic], ids, PAGE_BYTES)
        offsets: list[int] = []
        for some in _requests(pages):
            offsets += self._elastic[elastic](some, [])[0]
        return dict(zip(pages, offsets, strict=True))


def _move(
    transfer: _Transfer,
    fd: int,
    piece: memoryview,
    offset: int,
    pages: Mapping[int, int] | None,
) -> None:
    """Copy a piece. With `pages`, the file's offsets of pages, `offset` is the owner's address."""
    while piece:
        part, at = piece, offset
        if pages is not None:
            page, within = divmod(offset, PAGE_BYTES)
            part, at = piece[: PAGE_BYTES - within], pages[page] + within
            if pages[page] == NOT_MAPPED:
                raise DriverError(
                    "a block to be copied has no memory: its page is not mapped in the process that"
                    " registered it"
                )
        try:
            moved = transfer(fd, [part], at)
        except OSError as error:
            raise DriverError(f"the registered memory cannot be used: {error}") from error
        if moved == 0:
            raise DriverError(
                f"the registered memory ends before byte {at + len(part)}: its owner has"
                " shortened it"
            )
        piece, offset = piece[moved:], offset + moved


def _joined(buffers: Sequence[tuple[int, Buffer]]) -> list[tuple[int, Buffer]]:
    """Join buffers whose blocks are adjacent: fewer calls."""
    joined: list[tuple[int, Buffer]] = []
    for fd, buffer in buffers:
        last_fd, last = joined[-1] if joined else (-1, buffer)
        follows = last.offset + last.block_bytes == buffer.offset
        if fd == last_fd and follows and last.stride_bytes == buffer.stride_bytes:
            size_bytes = last.block_bytes + buffer.block_bytes
            joined[-1] = (fd, Buffer(last.offset, last.stride_bytes, size_bytes))
        else:
            joined.append((fd, buffer))
    return joined


class DeviceSpan(NamedTuple):
    """A range of a GPU's memory in another process."""

    device: Annotated[str, Meta(min_length=1, max_length=64)]
    """The GPU's UUID."""
    page_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)]
    pages: Annotated[int, Meta(ge=1, le=1 << 24)]

    @property
    def size_bytes(self) -> int:
        """Size of its address range."""
        return self.page_bytes * self.pages


class _Imported(NamedTuple):
    """A page that is mapped here."""

    handle: int
    generation: int


class DeviceBlocks(ForeignBlocks):
    """Blocks on a GPU. Opens the device at its first copy. Any thread may copy, one at a time."""

    def __init__(
        self, span: DeviceSpan, buffers: Sequence[Buffer], blocks: int, export: PageFinder
    ) -> None:
        """`buffers` are offsets in the span, in the order of a record."""
        super().__init__(buffers, blocks)
        self._span = span
        self._buffers = list(buffers)
        self._export = export
        self._copying = threading.Lock()
        """Held by a copy, and while pages are released."""
        self._is_closed = False
        self._driver: _vmm.CudaDriver | None = None
        self._address = 0
        self._imported: OrderedDict[int, _Imported] = OrderedDict()
        """By page, the least recently used first."""
        self._unmapped: deque[int] = deque()
        """Pages that their owner has unmapped, and that are not released yet."""

    def _copy(
        self, ids: Sequence[int], staging: Any, slots: Sequence[int], at: int, *, is_out: bool
    ) -> None:
        with self._mapped(ids) as here:
            if is_out:
                here.copy_out(ids, staging, slots, at)
            else:
                here.copy_in(staging, slots, ids, at)

    def release_unmapped(self, pages: Iterable[int]) -> None:
        """Release pages that their owner has unmapped, in a thread, after a copy in progress."""
        self._unmapped.extend(pages)
        _in_a_thread(self._release)

    def close(self) -> None:
        """Refuse copies; release all memory in a thread, after a copy in progress. Idempotent."""
        self._is_closed = True
        _in_a_thread(self._release)

    @contextmanager
    def _mapped(self, ids: Sequence[int]) -> Iterator[_vmm.EngineBlocks]:
        """Yield the blocks at local addresses, while the pages of `ids` are mapped."""
        pages = _pages_of(self._buffers, ids, self._span.page_bytes)
        try:
            with self._copying:
                if self._is_closed:
                    raise DriverError(_GONE)
                driver = self._open()
                for some in _requests(pages):
                    self._import(driver, some)
                parts = [buffer.part(self._address) for buffer in self._buffers]
                yield _vmm.EngineBlocks(driver, parts, self.blocks)
        finally:
            self._release()

    def _open(self) -> _vmm.CudaDriver:
        if self._driver is None:
            driver = _vmm.CudaDriver(self._span.device)
            driver.use_streams([])  # copies are synchronous, and no kernel runs here
            self._driver = driver
        if not self._address:
            self._address = self._driver.reserve(self._span.size_bytes)
        return self._driver

    def _import(self, driver: _vmm.CudaDriver, pages: list[int]) -> None:
        """Map the pages that are not imported yet, or in another generation."""
        while pages:
            known = [
                self._imported[page].generation if page in self._imported else NOT_IMPORTED
                for page in pages
            ]
            generations, descriptors = self._export(pages, known)
            try:
                changed = [
                    (page, generation)
                    for page, generation, before in zip(pages, generations, known, strict=True)
                    if generation != before
                ]
                if changed and not descriptors:
                    raise DriverError("the owner of a page has not exported it")
                for page in pages:
                    if page in self._imported:
                        self._imported.move_to_end(page)
                for (page, generation), fd in zip(changed, descriptors, strict=False):
                    self._map(driver, page, generation, fd)
            finally:
                for fd in descriptors:
                    os.close(fd)
            pages = [page for page, _ in changed[len(descriptors) :]]

    def _map(self, driver: _vmm.CudaDriver, page: int, generation: int, fd: int) -> None:
        page_bytes = self._span.page_bytes
        address = self._address + page * page_bytes
        self._unmap(page)
        handle = driver.import_page(fd)
        try:
            driver.map(address, page_bytes, handle)
        except BaseException:
            driver.destroy(handle, page_bytes)
            raise
        self._imported[page] = _Imported(handle, generation)
        try:
            driver.set_access(address, page_bytes)
        except BaseException:
            self._unmap(page)
            raise

    def _unmap(self, page: int) -> None:
        imported = self._imported.get(page)
        if imported is None or self._driver is None:
            return
        page_bytes = self._span.page_bytes
        self._driver.unmap(self._address + page * page_bytes, page_bytes)
        del self._imported[page]
        self._driver.destroy(imported.handle, page_bytes)

    def _release(self) -> None:
        """Release pages that are not to be kept. A copy in progress does it at its end."""
        while self._copying.acquire(blocking=False):
            try:
                while self._unmapped:
                    self._unmap(self._unmapped.popleft())
                kept = 0 if self._is_closed else MOST_KEPT_BYTES // self._span.page_bytes
                while len(self._imported) > kept:
                    self._unmap(next(iter(self._imported)))
                if self._is_closed and self._driver is not None and self._address:
                    self._driver.release(self._address, self._span.size_bytes)
                    self._address = 0
            except DriverError as error:
                _log.warning("pages of a rank stay allocated until it ends: %s", error)
                return
            finally:
                self._copying.release()
            # What came after the look has found the lock taken.
            if not self._unmapped and not (self._is_closed and self._address):
                return


_releases: Final = Workers("flexkv-releases")


def _in_a_thread(release: Callable[[], None]) -> None:
    """The driver takes milliseconds for many pages, and an endpoint's thread must not wait."""
    if _releases.submit(release) is None:  # the system has no thread left
        release()
