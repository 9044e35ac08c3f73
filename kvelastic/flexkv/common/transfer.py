"""What has to be moved for one request: operations between tiers, and their order.

    graph = TransferOpGraph()
    read = graph.add_transfer_op(TransferOp(TransferType.DISK2H, keys=keys))
    graph.add_dependency(graph.add_transfer_op(TransferOp(TransferType.H2D, keys=keys)), read)

A block is known by its key below the engine; block ids are those of the engine on the GPU's side,
and the store's own numbers on the other. Nothing here moves anything or takes a lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import KEY_BYTES, NO_KEY
from kvelastic.tiers.graph import Graph, Kind, Operation

GRAPH_END: Final = -1
"""The op id by which a graph's own end is told."""
NO_BLOCK: Final = -1
"""The id of a block whose store numbers none, or has not placed it yet."""

BlockIds = npt.NDArray[np.int64]


class DeviceType(IntEnum):
    """Where blocks lie."""

    CPU = 0
    GPU = 1
    SSD = 2
    REMOTE = 3
    PEERCPU = 4
    PEERSSD = 5


class TransferType(Enum):
    """From where to where. Those with GDS, a peer or layers are FlexKV's, and refused by name."""

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
"""Source and target of what can be moved."""


class TransferOpStatus(Enum):
    """How far an operation is."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


_op_ids = itertools.count(1)
_graph_ids = itertools.count(1)


def _ids(blocks: Any, count: int) -> BlockIds:
    if blocks is None:
        return np.full(count, NO_BLOCK, np.int64)
    return np.ascontiguousarray(blocks, np.int64)


@dataclass(eq=False)
class TransferOp:
    """Some blocks from one device to another.

    `keys` names them, side by side; source and target ids have one for each. Raises
    `InvalidArgumentError` where these do not fit together.
    """

    transfer_type: TransferType
    src_block_ids: Any = None
    dst_block_ids: Any = None
    keys: bytes = b""
    chain_after: bytes = NO_KEY
    """What the first of the keys continues; each other one continues the one before it."""
    dp_id: int = 0
    layer_granularity: int = -1
    op_id: int = field(default_factory=lambda: next(_op_ids))
    graph_id: int = -1
    predecessors: set[int] = field(default_factory=set)
    successors: set[int] = field(default_factory=set)
    status: TransferOpStatus = TransferOpStatus.PENDING
    moved: list[bool] = field(default_factory=list)
    """For each block whether it was moved; set when the operation is over."""

    def __post_init__(self) -> None:
        if len(self.keys) % KEY_BYTES:
            raise InvalidArgumentError(
                f"keys have {len(self.keys)} bytes, no multiple of {KEY_BYTES}; pass whole keys"
            )
        self.src_block_ids = _ids(self.src_block_ids, self.num_blocks)
        self.dst_block_ids = _ids(self.dst_block_ids, self.num_blocks)
        self._check()

    def _check(self) -> None:
        if not len(self.src_block_ids) == len(self.dst_block_ids) == self.num_blocks:
            raise InvalidArgumentError(
                f"{len(self.src_block_ids)} source and {len(self.dst_block_ids)} target blocks for"
                f" {self.num_blocks} keys; give as many of each"
            )

    @property
    def num_blocks(self) -> int:
        """How many blocks it moves."""
        return len(self.keys) // KEY_BYTES

    def key_list(self) -> list[bytes]:
        """The key of each block."""
        return [self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)]

    @property
    def engine_side(self) -> BlockIds | None:
        """The engine's block ids; None where it has no end on the GPU."""
        source, target = ENDS.get(self.transfer_type, (None, None))
        if source is DeviceType.GPU:
            return self.src_block_ids  # type: ignore[no-any-return]
        return self.dst_block_ids if target is DeviceType.GPU else None

    def bind(self, block_ids: BlockIds) -> None:
        """The engine's blocks, named late: when the transfer is launched."""
        if len(block_ids) != self.num_blocks:
            raise InvalidArgumentError(
                f"{len(block_ids)} blocks are bound to {self.num_blocks}; give one for each"
            )
        if ENDS[self.transfer_type][0] is DeviceType.GPU:
            self.src_block_ids = block_ids
        else:
            self.dst_block_ids = block_ids


class TransferOpGraph:
    """Operations by id, and which must be over before which."""

    def __init__(self) -> None:
        self.graph_id = next(_graph_ids)
        self.ops: dict[int, TransferOp] = {}
        self.task_end_op_id = GRAPH_END
        """What the caller waits for; operations that it does not need go on behind it."""

    @classmethod
    def create_empty_graph(cls) -> TransferOpGraph:
        """One that moves nothing and is over at once."""
        return cls()

    @property
    def num_ops(self) -> int:
        """How many operations it has."""
        return len(self.ops)

    def add_transfer_op(self, op: TransferOp) -> int:
        """Take an operation in; answers its id. Raises for one of another graph."""
        if op.graph_id not in (-1, self.graph_id) or op.op_id in self.ops:
            raise InvalidArgumentError(f"operation {op.op_id} is in a graph already; make another")
        op.graph_id = self.graph_id
        self.ops[op.op_id] = op
        return op.op_id

    def add_dependency(self, successor_op_id: int, predecessor_op_id: int) -> None:
        """The first comes after the second. Raises `InvalidArgumentError` for ids not there."""
        for op_id in (successor_op_id, predecessor_op_id):
            if op_id not in self.ops:
                raise InvalidArgumentError(f"operation {op_id} is not in graph {self.graph_id}")
        self.ops[successor_op_id].predecessors.add(predecessor_op_id)
        self.ops[predecessor_op_id].successors.add(successor_op_id)

    def needed_for(self, op_id: int) -> set[int]:
        """An operation and all that it comes after."""
        needed: set[int] = set()
        waiting = [op_id]
        while waiting:
            one = waiting.pop()
            if one not in needed:
                needed.add(one)
                waiting.extend(self.ops[one].predecessors)
        return needed

    def order(self) -> list[TransferOp]:
        """All operations, each after its predecessors. `InvalidArgumentError` for a cycle."""
        ops = list(self.ops.values())
        place = {op.op_id: at for at, op in enumerate(ops)}
        graph = Graph(
            Operation(Kind.GET, (), 0, after=tuple(place[before] for before in op.predecessors))
            for op in ops
        )
        return [ops[at] for at in graph.order]

    def bind_engine_blocks(self, block_ids: Sequence[int] | BlockIds) -> None:
        """The engine's blocks of the operation that has an end on the GPU, in its order."""
        blocks = np.ascontiguousarray(block_ids, np.int64)
        for op in self.ops.values():
            if op.engine_side is not None:
                op.bind(blocks)

    @property
    def is_over(self) -> bool:
        """Whether every operation has ended."""
        open_ = (TransferOpStatus.PENDING, TransferOpStatus.RUNNING)
        return not any(op.status in open_ for op in self.ops.values())


def keys_of(ops: Iterable[TransferOp]) -> bytes:
    """The keys of several operations, in their order."""
    return b"".join(op.keys for op in ops)
