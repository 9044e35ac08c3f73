"""Blocks in memory that other processes have given descriptors of, copied to and from staging.

    blocks = SharedBlocks([(fd, buffer), ...], blocks=1024)
    blocks.copy_out([3, 7], staging, slots=[0, 1])          # each block's buffers, side by side

What `_vmm.EngineBlocks` is for tensors of this process. The memory is read and written by its
descriptor and not mapped: were it mapped, an owner that shortened it would end this process with
SIGBUS. Short reads are an error of that copy alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvelastic.errors import DriverError, InvalidArgumentError
from kvelastic.flexkv.common.memory_handle import Buffer
from kvelastic.flexkv.common.process_mappings import NOT_MAPPED, PAGE_BYTES
from kvelastic.tiers.pool_side import StagingMemory

PageFinder = Callable[[list[int]], Sequence[int]]
"""Where in the file pages lie, by their addresses in units of `PAGE_BYTES`; see
`process_mappings.locate`. Blocks; raises what a lost connection raises."""


class SharedBlocks:
    """One rank's blocks. Owns its descriptors until `close`. Copies block; any thread may copy."""

    def __init__(
        self,
        buffers: Sequence[tuple[int, Buffer]],
        blocks: int,
        *,
        owned: Sequence[int] | None = None,
        elastic: Mapping[int, PageFinder] | None = None,
    ) -> None:
        """`buffers` are descriptors of memory and what lies there, in the order of a record.

        `owned` are the descriptors that go with it; those of `buffers` unless said otherwise. Of
        those in `elastic` offsets are addresses in their owner, who is asked for each copy where
        in the file the pages lie.
        """
        if not buffers or blocks < 1:
            raise InvalidArgumentError("blocks without a buffer, or none at all, hold nothing")
        self._count = blocks
        self._buffers = _joined(buffers)
        self._fds = set(owned if owned is not None else (fd for fd, _ in buffers))
        self._elastic = elastic or {}
        self._lock = threading.Lock()  # a leaf
        self._copies = 0
        self._is_closed = False

    @property
    def blocks(self) -> int:
        """How many there are."""
        return self._count

    @property
    def record_bytes(self) -> int:
        """Of one block in all its buffers."""
        return sum(buffer.block_bytes for _, buffer in self._buffers)

    def copy_out(
        self,
        ids: Sequence[int],
        staging: StagingMemory,
        slots: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        """Blocks to slots, from byte `offset_bytes` of each on.

        Raises `InvalidArgumentError` for a block that is not there, nothing copied; `DriverError`
        where the memory ends too early.
        """
        self._copy(ids, staging, slots, offset_bytes, os.preadv)

    def copy_in(
        self,
        staging: StagingMemory,
        slots: Sequence[int],
        ids: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        """The other way round."""
        self._copy(ids, staging, slots, offset_bytes, os.pwritev)

    def close(self) -> None:
        """Refuse copies from now on; the descriptors go with the last one that runs. Repeatable."""
        with self._lock:
            self._is_closed = True
        self._close_unused()

    def _close_unused(self) -> None:
        # A number that is closed under a copy could be another file's when the copy uses it.
        with self._lock:
            if self._copies or not self._is_closed:
                return
            fds, self._fds = self._fds, set()
        for fd in fds:
            os.close(fd)

    def _copy(
        self,
        ids: Sequence[int],
        staging: StagingMemory,
        slots: Sequence[int],
        offset_bytes: int,
        transfer: Callable[[int, Sequence[memoryview], int], int],
    ) -> None:
        for block in ids:
            if not 0 <= block < self._count:
                raise InvalidArgumentError(f"block {block} is none of {self._count}")
        with self._in_use():
            pages = self._locate(ids)
            for block, slot in zip(ids, slots, strict=True):
                record = staging.view(slot)
                done = offset_bytes
                for fd, buffer in self._buffers:
                    piece = record[done : done + buffer.block_bytes]
                    at = buffer.offset + block * buffer.stride_bytes
                    if fd in self._elastic:
                        _move_in_pages(transfer, fd, piece, at, pages[fd])
                    else:
                        _move(transfer, fd, piece, at)
                    done += buffer.block_bytes

    def _locate(self, ids: Sequence[int]) -> dict[int, dict[int, int]]:
        """For each elastic memory, where in its file the pages lie that these blocks have."""
        found: dict[int, dict[int, int]] = {}
        for fd, find in self._elastic.items():
            wanted: set[int] = set()
            for other, buffer in self._buffers:
                if other == fd:
                    for block in ids:
                        first = buffer.offset + block * buffer.stride_bytes
                        last = first + buffer.block_bytes - 1
                        wanted.update(range(first // PAGE_BYTES, last // PAGE_BYTES + 1))
            pages = sorted(wanted)
            found[fd] = dict(zip(pages, find(pages), strict=True))
        return found

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise DriverError("the process that registered these blocks has gone")
            self._copies += 1
        try:
            yield
        finally:
            with self._lock:
                self._copies -= 1
            self._close_unused()


def _move(
    transfer: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    piece: memoryview,
    offset: int,
) -> None:
    while piece:
        try:
            moved = transfer(fd, [piece], offset)
        except OSError as error:
            raise DriverError(f"the registered memory cannot be used: {error}") from error
        if moved == 0:
            raise DriverError(
                f"the registered memory ends before byte {offset + len(piece)}: its owner has"
                " shortened it"
            )
        piece, offset = piece[moved:], offset + moved


def _move_in_pages(
    transfer: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    piece: memoryview,
    address: int,
    pages: Mapping[int, int],
) -> None:
    while piece:
        page, within = divmod(address, PAGE_BYTES)
        if pages[page] == NOT_MAPPED:
            raise DriverError(
                "a block to be copied has no memory: its page is not mapped in the process that"
                " registered it"
            )
        count = min(len(piece), PAGE_BYTES - within)
        _move(transfer, fd, piece[:count], pages[page] + within)
        piece, address = piece[count:], address + count


def _joined(buffers: Sequence[tuple[int, Buffer]]) -> list[tuple[int, Buffer]]:
    """Buffers whose blocks lie behind one another are one: fewer calls."""
    joined: list[tuple[int, Buffer]] = []
    for fd, buffer in buffers:
        if joined:
            last_fd, last = joined[-1]
            follows = last.offset + last.block_bytes == buffer.offset
            if fd == last_fd and follows and last.stride_bytes == buffer.stride_bytes:
                joined[-1] = (
                    fd,
                    Buffer(last.offset, last.stride_bytes, last.block_bytes + buffer.block_bytes),
                )
                continue
        joined.append((fd, buffer))
    return joined
