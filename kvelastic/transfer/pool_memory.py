"""Registers an elastic pool's blocks as memory that peers may access.

    registered = register_pool(node, pool)        # an ElasticPool over memory of this process

Blocks are pinned during a copy and their page generation is checked after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvelastic import _vmm
from kvelastic.errors import UnsupportedError
from kvelastic.pool.pool import ElasticPool
from kvelastic.transfer.memory_pieces import Piece, packed_of
from kvelastic.transfer.ranges import Hold, Registered

if TYPE_CHECKING:
    from kvelastic.transfer.node import Node


def register_pool(node: Node, pool: ElasticPool) -> Registered:
    """Allow peers to access the pool's blocks in use. The pool may map and unmap pages as usual.

    A copy of a block that is neither in use nor cached is refused (`UnknownBlockError`). Raises
    `UnsupportedError` for memory that other processes map, and for GPU memory.
    """
    if not isinstance(pool.memory, _vmm.Range) or not pool.is_on_host:
        raise UnsupportedError("peers reach pools in host memory of this process only")
    return register_blocks(node, pool.memory, pool.blocks)


def register_blocks(node: Node, memory: _vmm.Range, blocks: _vmm.Pool) -> Registered:
    """Register the blocks of a native pool over host memory; see `register_pool`."""

    def hold(pieces: Sequence[Piece]) -> Hold:
        return _vmm.HeldBlocks.hold(memory, blocks, packed_of(pieces).packed)

    return node.register(memory.address, memory.range_bytes, hold=hold)
