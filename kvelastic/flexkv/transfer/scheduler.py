"""Converts a graph of operations to transfers of the tiers' executor. Pure.

A graph becomes *stages*, which run one after the other. A stage has the operations whose
predecessors are all in earlier stages, and is one transfer. Each batch of blocks fills staging
slots once, and all operations with these blocks and this source empty them. A read into the CPU
tier joins the H2D that needs its blocks, and stores them there after the copy to the engine:

    DISK2H -> H2D      get(ssd) -> copy in -> put(cpu)      the put is not awaited
    H2D                get(cpu) -> copy in
    D2H                copy out -> put(cpu)
    H2DISK, H2REMOTE   get(cpu) -> put(ssd), put(remote)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvelastic.errors import InvalidArgumentError, UnsupportedError
from kvelastic.flexkv.common.transfer import (
    ENDS,
    NO_BLOCK,
    DeviceType,
    TransferOp,
    TransferOpGraph,
    TransferType,
)
from kvelastic.flexkv.transfer.worker import MOST_BLOCKS
from kvelastic.tiers.base import each_key
from kvelastic.tiers.graph import NO_TIER, Graph, Kind, Operation
from kvelastic.tiers.transfer_run import Run

INSTEAD: Final = {
    TransferType.DISK2D: "DISK2H, then H2D: blocks pass pinned host memory",
    TransferType.D2DISK: "D2H, then H2DISK: blocks pass pinned host memory",
    TransferType.PEERH2H: "REMOTE2H from a store that the machines share",
    TransferType.H2PEERH: "H2REMOTE to a store that the machines share",
    TransferType.PEERSSD2H: "REMOTE2H from a store that the machines share",
    TransferType.H2PEERSSD: "H2REMOTE to a store that the machines share",
    TransferType.LAYERWISE: "H2D of all layers",
}
_READS: Final = (TransferType.DISK2H, TransferType.REMOTE2H)


class _Group(NamedTuple):
    """Operations with the same blocks and source, and which operation reads which of them."""

    fills: Sequence[tuple[TransferOp, list[int]]]
    ops: list[TransferOp]


class Stage:
    """One transfer of the executor, and the operations that it performs."""

    def __init__(
        self,
        groups: Iterable[_Group],
        tiers: Mapping[DeviceType, int],
        batch_blocks: int,
        *,
        is_awaited: bool,
    ) -> None:
        """`is_awaited`: the caller waits for an operation of this or a later stage."""
        self.is_awaited: Final = is_awaited
        self.ops: list[TransferOp] = []
        self.op_of: list[TransferOp] = []
        """For each of the executor's operations, the one that it belongs to."""
        self.keys = b""
        self.ids: list[int] = []
        self.parents: list[bytes] = []
        self._tiers: Final = {**tiers, DeviceType.GPU: NO_TIER}
        self._items: dict[int, Sequence[int]] = {}
        """By op id: its blocks as items of the transfer."""
        self._operations: list[Operation] = []
        batch = 0
        for fills, ops in groups:
            first = len(self.ids)
            self._add_items(ops[0])
            self.ops += ops
            self._items.update({op.op_id: range(first, len(self.ids)) for op in ops})
            ends = [(op, *self._steps(op)[1]) for op in ops]
            for reader, places in fills:
                items = [first + place for place in places]
                reads, stores = self._steps(reader)
                last = []
                if reader is not ops[0]:
                    self.ops.append(reader)
                    self._items[reader.op_id] = items
                    last = [(reader, *stores)]
                for at in range(0, len(items), batch_blocks):
                    some = tuple(items[at : at + batch_blocks])
                    after = self._push([(reader, *reads)], some, batch)
                    after = self._push(ends, some, batch, after)
                    self._push(last, some, batch, after, is_awaited=False)
                    batch += 1
        self.graph: Final = Graph(self._operations, len(self.ids))

    def _add_items(self, op: TransferOp) -> None:
        keys, engine = each_key(op.keys), op.engine_side
        base = op.dp_id * MOST_BLOCKS
        self.keys += op.keys
        self.ids += [NO_BLOCK] * len(keys) if engine is None else (engine + base).tolist()
        self.parents += [op.chain_after, *keys][: len(keys)]

    def _push(
        self,
        steps: Iterable[tuple[TransferOp, Kind, int]],
        items: tuple[int, ...],
        batch: int,
        after: tuple[int, ...] = (),
        *,
        is_awaited: bool = True,
    ) -> tuple[int, ...]:
        """Add a step of each operation; return their indices."""
        first = len(self.op_of)
        for op, kind, tier in steps:
            self.op_of.append(op)
            step = Operation(kind, items, tier, after, batch, is_awaited=is_awaited)
            self._operations.append(step)
        return tuple(range(first, len(self.op_of)))

    def _steps(self, op: TransferOp) -> list[tuple[Kind, int]]:
        """Return the steps that move a block to staging and then to its target."""
        if op.transfer_type is TransferType.VIRTUAL:
            return [(Kind.GET, NO_TIER)] * 2
        source, target = ENDS.get(op.transfer_type, (None, None))
        if source not in self._tiers or target not in self._tiers:
            instead = INSTEAD.get(op.transfer_type, "a configuration with that tier")
            raise UnsupportedError(f"{op.transfer_type.value} is not done here; use {instead}")
        return [
            (Kind.COPY_OUT if source is DeviceType.GPU else Kind.GET, self._tiers[source]),
            (Kind.COPY_IN if target is DeviceType.GPU else Kind.PUT, self._tiers[target]),
        ]

    def moved(self, op: TransferOp, run: Run) -> list[bool]:
        """For each block of one of `ops`, whether it was copied."""
        items = self._items[op.op_id]
        if op.transfer_type is TransferType.H2D:
            return [run.loaded[item] for item in items]
        tier = self._tiers[ENDS[op.transfer_type][1]]
        # A joined read has done its part once its blocks are in the engine's.
        return [run.loaded[item] or tier in run.stored[item] for item in items]


class TransferScheduler:
    """Plans graphs over `tiers`, `batch_blocks` at a time. Has no state."""

    def __init__(self, tiers: Mapping[DeviceType, int], batch_blocks: int) -> None:
        self._tiers = tiers
        self._batch_blocks = batch_blocks

    def stages(self, graph: TransferOpGraph) -> list[Stage]:
        """Return the transfers to run one after the other; none for a graph without operations.

        Raises `InvalidArgumentError` for a cycle and for a block named twice in one operation, and
        `UnsupportedError` for an operation that kvelastic or this configuration does not have.
        """
        order = graph.order()
        fills = {op.op_id: _fills(graph, op) for op in order}
        joined = {read.op_id for each in fills.values() for read, _ in each[:-1]}
        number: dict[int, int] = {}
        stages: list[dict[Any, _Group]] = []
        for op in order:
            before = [number[one] + (one not in joined) for one in op.predecessors]
            at = number[op.op_id] = max(before, default=0)
            if at == len(stages):
                stages.append({})
            if op.op_id in joined:
                continue
            source, _ = ENDS.get(op.transfer_type, (None, None))
            blocks = (source, op.keys) if op.engine_side is None else op.op_id
            stages[at].setdefault(blocks, _Group(fills[op.op_id], [])).ops.append(op)
        end = number.get(graph.task_end_op_id, len(stages))
        return [
            Stage(groups.values(), self._tiers, self._batch_blocks, is_awaited=at <= end)
            for at, groups in enumerate(stages)
        ]


def _fills(graph: TransferOpGraph, op: TransferOp) -> list[tuple[TransferOp, list[int]]]:
    """Return the reads that an operation is joined by, with the places of their blocks.

    The last entry is the operation itself, with the other blocks.
    """
    left = {key: place for place, key in enumerate(each_key(op.keys))}
    if len(left) != op.num_blocks:
        raise InvalidArgumentError(f"operation {op.op_id} names a block twice; name it once")
    fills = []
    for read in [graph.ops[one] for one in op.predecessors]:
        keys = each_key(read.keys)
        is_for_it = read.transfer_type in _READS and op.transfer_type is TransferType.H2D
        if is_for_it and read.successors == {op.op_id} and left.keys() >= set(keys):
            fills.append((read, [left.pop(key) for key in keys]))
    return [*fills, (op, list(left.values()))]
