"""Blocks of an elastic pool as memory that peers may reach: pinned for a copy, compared after it.

registered = register_pool(node, pool)        # an ElasticPool over memory of this process
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError, UnsupportedError
from kvelastic.pool import ElasticPool
from kvelastic.transfer.pieces import Piece
from kvelastic.transfer.ranges import Hold, Registered

if TYPE_CHECKING:
    from kvelastic.transfer.node import Node


class _PinnedBlocks:
    """Blocks under a pin, and their pages' generations when it began."""

    def __init__(
        self, memory: _vmm.Range, pool: _vmm.Pool, ids: list[int], pages: set[int]
    ) -> None:
        self._memory, self._pool = memory, pool
        # Pinned first: a page of a pinned block is not unmapped by anything but a close.
        self._ticket = pool.pin(ids)
        self._generations = {page: memory.generation(page) for page in pages}

    def is_whole(self) -> bool:
        return all(
            self._memory.is_mapped(page) and self._memory.generation(page) == generation
            for page, generation in self._generations.items()
        )

    def release(self) -> None:
        self._pool.unpin(self._ticket)


def register_pool(node: Node, pool: ElasticPool) -> Registered:
    """Let peers reach the pool's blocks that are in use. Its pages may come and go as ever.

    A copy that names a block that is neither used nor cached is refused (`UnknownBlockError`).
    Raises `UnsupportedError` for memory that other processes map, or that is a GPU's.
    """
    if not isinstance(pool.memory, _vmm.Range) or not pool.is_on_host:
        raise UnsupportedError("peers reach pools in host memory of this process only")
    return register_blocks(node, pool.memory, pool.blocks)


def register_blocks(node: Node, memory: _vmm.Range, blocks: _vmm.Pool) -> Registered:
    """The same for a native pool over host memory."""
    geometry = memory.geometry
    base = memory.address

    def hold(pieces: Sequence[Piece]) -> Hold:
        ids: set[int] = set()
        pages: set[int] = set()
        for address, size in pieces:
            for id_, page in _blocks_of(geometry, address - base, size):
                ids.add(id_)
                pages.add(page)
        return _PinnedBlocks(memory, blocks, sorted(ids), pages)

    return node.register(base, memory.range_bytes, hold=hold)


def _blocks_of(geometry: _vmm.Geometry, offset: int, size: int) -> list[tuple[int, int]]:
    """Ids and pages of the blocks that bytes of the range belong to.

    page     | slice 0: blocks_per_page blocks | slice 1 | ... | padding |
    address  = extent * extent_stride + (slice * blocks_per_page + id) * block_bytes

    Raises `InvalidArgumentError` for bytes where no block lives.
    """
    found = []
    at = offset
    while at < offset + size:
        extent_stride = geometry.extent_stride_bytes
        in_extent = at % extent_stride if geometry.extents_per_page > 1 else at
        page = in_extent // geometry.extent_bytes
        # Where the page's first block begins, counted in blocks from the start of the extents.
        first = geometry.first_id(page)
        index = in_extent // geometry.block_bytes - first
        slice_, nth = divmod(index, geometry.blocks_per_page)
        if index < 0 or slice_ >= geometry.buffers_per_extent or page >= geometry.pages:
            raise InvalidArgumentError(f"no block lies at byte {at} of the pool (page {page})")
        found.append((first + nth, page))
        at += geometry.block_bytes - in_extent % geometry.block_bytes
    return found
