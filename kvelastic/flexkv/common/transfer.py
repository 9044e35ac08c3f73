"""The copies of one request: operations between tiers, and their order.

    graph = TransferOpGraph()
    read = graph.add_transfer_op(TransferOp(TransferType.DISK2H, keys=keys))
    graph.add_dependency(graph.add_transfer_op(TransferOp(TransferType.H2D, keys=keys)), read)

Keys identify blocks in tiers. Block ids are the engine's, on the GPU. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import KEY_BYTES, NO_KEY

GRAPH_END: Final = -1
"""The op id that reports the end of a graph."""
NO_BLOCK: Final = -1

BlockIds = npt.NDArray[np.int64]


class DeviceType(IntEnum):
    """Where blocks are stored."""

    CPU = 0
    GPU = 1
    SSD = 2
    REMOTE = 3
    PEERCPU = 4
    PEERSSD = 5


class TransferType(Enum):
    """Source and target. Types not in `ENDS` are refused; VIRTUAL copies nothing."""

    H2D = "H2D"
    D2H = "D2H"
    DISK2H = "DISK2H"
    H2DISK = "H2DISK"
    DISK2D = "DISK2D"
    D2DISK = "D2DISK"
    REMOTE2H = "REMOTE2H"
    H2REMOTE = "H2REMOTE"
    PEERH2H = "PEERH2H"
    H2PEERH = "H2PEERH"
    PEERSSD2H = "PEERSSD2H"
    H2PEERSSD = "H2PEERSSD"
    VIRTUAL = "VIRTUAL"
    LAYERWISE = "LAYERWISE"


ENDS: Final = {
    TransferType.H2D: (DeviceType.CPU, DeviceType.GPU),
    TransferType.D2H: (DeviceType.GPU, DeviceType.CPU),
    TransferType.DISK2H: (DeviceType.SSD, DeviceType.CPU),
    TransferType.H2DISK: (DeviceType.CPU, DeviceType.SSD),
    TransferType.REMOTE2H: (DeviceType.REMOTE, DeviceType.CPU),
    TransferType.H2REMOTE: (DeviceType.CPU, DeviceType.REMOTE),
}


class TransferOpStatus(Enum):
    """The state of an operation."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


_op_ids = itertools.count(1)
_graph_ids = itertools.count(1)


@dataclass(eq=False)
class TransferOp:
    """A copy of blocks from one device to another.

    `keys` are concatenated; source and target have one id for each key. Raises
    `InvalidArgumentError` if their numbers differ.
    """

    transfer_type: TransferType
    src_block_ids: Any = None
    dst_block_ids: Any = None
    keys: bytes = b""
    chain_after: bytes = NO_KEY
    """Key before the first one; each other key continues its predecessor."""
    dp_id: int = 0
    layer_granularity: int = -1
    op_id: int = field(default_factory=lambda: next(_op_ids))
    graph_id: int = -1
    predecessors: set[int] = field(default_factory=set)
    successors: set[int] = field(default_factory=set)
    status: TransferOpStatus = TransferOpStatus.PENDING
    moved: list[bool] = field(default_factory=list)
    """For each block, whether it was copied; set when the operation ends."""

    def __post_init__(self) -> None:
        if len(self.keys) % KEY_BYTES:
            raise InvalidArgumentError(
                f"keys have {len(self.keys)} bytes, no multiple of {KEY_BYTES}; pass whole keys"
            )
        self.num_blocks = len(self.keys) // KEY_BYTES
        self.src_block_ids = self._ids(self.src_block_ids)
        self.dst_block_ids = self._ids(self.dst_block_ids)

    def _ids(self, blocks: Any) -> BlockIds:
        if blocks is None:
            return np.full(self.num_blocks, NO_BLOCK, np.int64)
        if len(blocks) != self.num_blocks:
            raise InvalidArgumentError(
                f"{len(blocks)} blocks for {self.num_blocks} keys; give one for each"
            )
        return np.ascontiguousarray(blocks, np.int64)

    @property
    def engine_side(self) -> BlockIds | None:
        """The engine's block ids; None if neither end is on the GPU."""
        source, target = ENDS.get(self.transfer_type, (None, None))
        found: BlockIds | None = self.dst_block_ids if target is DeviceType.GPU else None
        return self.src_block_ids if source is DeviceType.GPU else found

    def bind(self, block_ids: Any) -> None:
        """Set the engine's blocks, which become known at launch."""
        if self.transfer_type is TransferType.D2H:
            self.src_block_ids = self._ids(block_ids)
        else:
            self.dst_block_ids = self._ids(block_ids)


class TransferOpGraph:
    """Operations by id, with dependencies."""

    def __init__(self) -> None:
        self.graph_id = next(_graph_ids)
        self.ops: dict[int, TransferOp] = {}
        self.task_end_op_id = GRAPH_END
        """The operation that the caller waits for. Other operations may run after it."""

    @classmethod
    def create_empty_graph(cls) -> TransferOpGraph:
        """Return a graph that copies nothing. The name is FlexKV's."""
        return cls()

    @property
    def num_ops(self) -> int:
        """The number of operations."""
        return len(self.ops)

    def add_transfer_op(self, op: TransferOp) -> int:
        """Add an operation and return its id. Raises `InvalidArgumentError` if it is in a graph."""
        if op.graph_id not in (-1, self.graph_id) or op.op_id in self.ops:
            raise InvalidArgumentError(f"operation {op.op_id} is in a graph already; make another")
        op.graph_id = self.graph_id
        self.ops[op.op_id] = op
        return op.op_id

    def add_dependency(self, successor_op_id: int, predecessor_op_id: int) -> None:
        """Run the first operation after the second.

        Raises `InvalidArgumentError` for unknown ids.
        """
        for op_id in (successor_op_id, predecessor_op_id):
            if op_id not in self.ops:
                raise InvalidArgumentError(f"operation {op_id} is not in graph {self.graph_id}")
        self.ops[successor_op_id].predecessors.add(predecessor_op_id)
        self.ops[predecessor_op_id].successors.add(successor_op_id)

    def order(self) -> list[TransferOp]:
        """Return the operations in topological order. Raises `InvalidArgumentError` for a cycle."""
        sorter = TopologicalSorter({op.op_id: op.predecessors for op in self.ops.values()})
        try:
            return [self.ops[op_id] for op_id in sorter.static_order()]
        except CycleError as error:
            raise InvalidArgumentError(
                f"operations {error.args[1][:8]} wait for one another; a graph has no cycle"
            ) from None

    def bind_engine_blocks(self, block_ids: Sequence[int] | BlockIds) -> None:
        """Set the engine's blocks in every operation with an end on the GPU."""
        for op in self.ops.values():
            if op.engine_side is not None:
                op.bind(block_ids)
