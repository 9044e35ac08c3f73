"""Blocks of an elastic pool as memory that peers may reach: pinned for a copy, compared after it.

registered = register_pool(node, pool)        # an ElasticPool over memory of this process
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvelastic import _vmm
from kvelastic.errors import UnsupportedError
from kvelastic.pool import ElasticPool
from kvelastic.transfer.pieces import Piece, packed_of
from kvelastic.transfer.ranges import Hold, Registered

if TYPE_CHECKING:
    from kvelastic.transfer.node import Node


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

    def hold(pieces: Sequence[Piece]) -> Hold:
        return _vmm.HeldBlocks.hold(memory, blocks, packed_of(pieces).packed)

    return node.register(memory.address, memory.range_bytes, hold=hold)
