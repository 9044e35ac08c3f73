"""Converts a graph of operations to transfers of the tiers' executor. Pure.

A graph becomes one or two *stages*. Each stage is one transfer:

    stage 0   the operation that the caller waits for, and all its predecessors
    stage 1   the rest, at a lower priority, after stage 0: copies to farther tiers

Within a stage, blocks are copied in batches. An operation fills staging slots and empties them.
Slots that an earlier operation has filled are not filled again:

    DISK2H -> H2D      get(ssd) -> copy in -> put(cpu)      the put is not awaited
    H2D                get(cpu) -> copy in
    D2H                copy out -> put(cpu)
    H2DISK             get(cpu) -> put(ssd)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

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


@dataclass
class Stage:
    """One transfer of the executor, and the operations that it performs."""

    ops: Sequence[TransferOp]
    tiers: Mapping[DeviceType, int]
    batch_blocks: int
    operations: list[Operation] = field(default_factory=list)
    op_of: list[TransferOp] = field(default_factory=list)
    """For each of the executor's operations, the one that it belongs to."""
    items_of: dict[int, list[int]] = field(default_factory=dict)
    """By op id: its blocks as items of the transfer."""
    ids: list[int] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    _item_of: dict[bytes, int] = field(default_factory=dict)
    _batch_of: list[int] = field(default_factory=list)
    _filled_by: dict[int, int] = field(default_factory=dict)
    """For each item, the operation that fills its staging slot."""
    _ends: dict[int, dict[int, int]] = field(default_factory=dict)
    """By op id and batch: the operation that ends it."""

    def __post_init__(self) -> None:
        for op in self.ops:
            self.items_of[op.op_id] = self._items(op)
        promotions = self._promotions()
        for op in self.ops:
            if op.transfer_type is not TransferType.VIRTUAL:
                self._add(op, is_promotion=op.op_id in promotions)
        for op in self.ops:
            if op.op_id in promotions:
                self._promote(op)
        self.graph = Graph(self.operations, len(self.ids))
        self.keys = b"".join(self._item_of)

    def moved(self, op: TransferOp, run: Run) -> list[bool]:
        """For each block of one of `ops`, whether it was copied."""
        items, kind = self.items_of[op.op_id], op.transfer_type
        if kind is TransferType.H2D:
            return [run.loaded[item] for item in items]
        target = ENDS[kind][1]
        if target is DeviceType.CPU and any(run.loaded[item] for item in items):
            return [run.staged[item] or run.loaded[item] for item in items]
        return [self.tiers[target] in run.stored[item] for item in items]

    def _items(self, op: TransferOp) -> list[int]:
        """Return an operation's blocks as items; new items go into batches of their own."""
        keys = op.key_list()
        if len(set(keys)) != len(keys):
            raise InvalidArgumentError(f"operation {op.op_id} names a block twice; name it once")
        base, engine = op.dp_id * MOST_BLOCKS, op.engine_side
        blocks = [NO_BLOCK] * len(keys) if engine is None else (engine + base).tolist()
        first, batches = len(self.ids), 1 + (self._batch_of[-1] if self._batch_of else -1)
        for at, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            item = self._item_of.setdefault(key, len(self.ids))
            if item == len(self.ids):
                self.ids.append(block)
                self.parents.append(keys[at - 1] if at else op.chain_after)
                self._batch_of.append(batches + (item - first) // self.batch_blocks)
            elif engine is not None:
                if self.ids[item] not in (NO_BLOCK, block):
                    raise InvalidArgumentError(
                        f"operation {op.op_id} names block {block - base} for a key that another"
                        " one has in another block; make a graph for each"
                    )
                self.ids[item] = block
        return [self._item_of[key] for key in keys]

    def _promotions(self) -> set[int]:
        """Return the reads into the CPU tier whose blocks continue to the engine in this stage."""
        reads = {
            op.op_id: set(op.key_list())
            for op in self.ops
            if op.transfer_type in (TransferType.DISK2H, TransferType.REMOTE2H)
        }
        return {
            before
            for op in self.ops
            for before in op.predecessors & reads.keys()
            if op.transfer_type is TransferType.H2D and reads[before] <= set(op.key_list())
        }

    def _add(self, op: TransferOp, *, is_promotion: bool) -> None:
        fill, empty = self._steps(op.transfer_type)
        for batch, items in self._batches(op):
            after = self._before(op, batch)
            unread = tuple(item for item in items if item not in self._filled_by)
            if unread:
                self._filled_by.update(dict.fromkeys(unread, len(self.operations)))
                self._push(op, Operation(fill[0], unread, fill[1], after, batch))
            if not is_promotion:
                before = tuple(sorted({self._filled_by[item] for item in items} | set(after)))
                self._ends.setdefault(op.op_id, {})[batch] = len(self.operations)
                self._push(op, Operation(empty[0], tuple(items), empty[1], before, batch))

    def _promote(self, op: TransferOp) -> None:
        """Store the blocks of a read, after the copy to the engine that the caller waits for."""
        kind, tier = self._steps(op.transfer_type)[1]
        reads: dict[int, list[int]] = {}
        for place, other in enumerate(self.operations):
            if other.kind in (Kind.COPY_IN, Kind.GET):
                reads.setdefault(other.batch, []).append(place)
        for batch, items in self._batches(op):
            after = tuple(reads[batch])
            put = Operation(kind, tuple(items), tier, after, batch, is_awaited=False)
            self._push(op, put)

    def _steps(self, kind: TransferType) -> list[tuple[Kind, int]]:
        """Return the steps that move a block to staging and then to its target."""
        known = {**self.tiers, DeviceType.GPU: NO_TIER}
        source, target = ENDS.get(kind, (None, None))
        if source not in known or target not in known:
            instead = INSTEAD.get(kind, "a configuration with that tier")
            raise UnsupportedError(f"{kind.value} is not done here; use {instead}")
        return [
            (Kind.COPY_OUT if source is DeviceType.GPU else Kind.GET, known[source]),
            (Kind.COPY_IN if target is DeviceType.GPU else Kind.PUT, known[target]),
        ]

    def _batches(self, op: TransferOp) -> Iterable[tuple[int, list[int]]]:
        found: dict[int, list[int]] = {}
        for batch, items in groupby(self.items_of[op.op_id], self._batch_of.__getitem__):
            found.setdefault(batch, []).extend(items)
        return found.items()

    def _push(self, op: TransferOp, operation: Operation) -> None:
        self.operations.append(operation)
        self.op_of.append(op)

    def _before(self, op: TransferOp, batch: int) -> tuple[int, ...]:
        """Return the same batch of a predecessor, or all of it if it has other blocks."""
        before: set[int] = set()
        for predecessor in op.predecessors:
            ends = self._ends.get(predecessor, {})
            before.update([ends[batch]] if batch in ends else ends.values())
        return tuple(sorted(before))


class TransferScheduler:
    """Plans graphs over `tiers`, `batch_blocks` at a time. Has no state."""

    def __init__(self, tiers: Mapping[DeviceType, int], batch_blocks: int) -> None:
        self._tiers = tiers
        self._batch_blocks = batch_blocks

    def stages(self, graph: TransferOpGraph) -> list[Stage]:
        """Return the transfers to run one after the other; none for a graph without operations.

        Raises `InvalidArgumentError` for a cycle, for a block named twice in one operation, and for
        a block that two operations place in two engine blocks. Raises `UnsupportedError` for an
        operation that kvelastic or this configuration does not have.
        """
        order = graph.order()
        has_end = graph.task_end_op_id in graph.ops
        needed = graph.needed_for(graph.task_end_op_id) if has_end else graph.ops.keys()
        first = [op for op in order if op.op_id in needed]
        rest = [op for op in order if op.op_id not in needed]
        return [Stage(ops, self._tiers, self._batch_blocks) for ops in (first, rest) if ops]
