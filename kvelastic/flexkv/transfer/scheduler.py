"""From a graph of operations to transfers of the executor: what comes after what.

Pure; nothing is moved here. A graph becomes one or two *stages*, each a transfer of its own:

    stage 0   what the caller waits for: the task-end operation and all that it needs
    stage 1   the rest, with lower priority, when stage 0 is over: copies to farther tiers

In a stage blocks go in batches. A record that an operation has brought into staging is not read
again by the next one, and a batch goes on while others wait:

    DISK2H -> H2D      get(ssd) -> copy in -> put(cpu)      nobody waits for the put
    H2D                get(cpu) -> copy in
    D2H                copy out -> put(cpu)
    H2DISK             get(cpu) -> put(ssd)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.transfer import TransferOp, TransferOpGraph, TransferType
from kvelastic.flexkv.transfer.worker import (
    MOST_BLOCKS,
    GPUCPUTransferWorker,
    TransferWorker,
    worker_for,
)
from kvelastic.tiers.graph import Graph, Kind, Operation
from kvelastic.tiers.run import Run


@dataclass
class Stage:
    """One transfer of the executor, and which operations it carries out."""

    graph: Graph
    keys: bytes
    ids: list[int]
    parents: list[bytes]
    ops: list[TransferOp]
    op_at: list[int]
    """For each operation of the executor the place in `ops` of what it is for."""
    items_of: list[list[int]]
    """For each of `ops` its blocks, as items of the transfer."""

    def moved(self, at: int, run: Run, cpu_tier: int, tier: int) -> list[bool]:
        """What of one of `ops` was moved. `tier` is its target's, and -1 where that is the GPU."""
        items = self.items_of[at]
        kind = self.ops[at].transfer_type
        if kind is TransferType.H2D:
            return [run.loaded[item] for item in items]
        if tier == cpu_tier and any(run.loaded[item] for item in items):
            return [run.staged[item] or run.loaded[item] for item in items]
        return [tier in run.stored[item] for item in items]


@dataclass
class _Lowering:
    """A stage on its way."""

    workers: Sequence[TransferWorker]
    batch_blocks: int
    operations: list[Operation] = field(default_factory=list)
    op_at: list[int] = field(default_factory=list)
    item_of: dict[bytes, int] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    batch_of: list[int] = field(default_factory=list)
    filled_by: dict[int, int] = field(default_factory=dict)
    """By item, the operation that brings its record into staging."""
    last_of: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """By op id and batch, the operations that end it."""
    batches: int = 0

    def items_of(self, op: TransferOp) -> list[int]:
        """Its blocks as items; new ones come into batches of their own."""
        keys = op.key_list()
        if len(set(keys)) != len(keys):
            raise InvalidArgumentError(f"operation {op.op_id} names a block twice; name it once")
        engine = op.engine_side
        ids = (
            [-1] * len(keys)
            if engine is None
            else GPUCPUTransferWorker.engine_ids(op.dp_id, engine.tolist())
        )
        new = [at for at, key in enumerate(keys) if key not in self.item_of]
        if engine is not None and len(new) < len(keys):
            self._bind(op, keys, ids)
        first = len(self.ids)
        self.item_of.update((keys[at], item) for item, at in enumerate(new, first))
        self.ids += [ids[at] for at in new]
        parents = [op.chain_after, *keys[:-1]]
        self.parents += [parents[at] for at in new]
        self.batch_of += [self.batches + place // self.batch_blocks for place in range(len(new))]
        self.batches += -(-len(new) // self.batch_blocks)
        return [self.item_of[key] for key in keys]

    def _bind(self, op: TransferOp, keys: Sequence[bytes], ids: Sequence[int]) -> None:
        """The engine's blocks of keys that an operation before it has named."""
        for key, block in zip(keys, ids, strict=True):
            item = self.item_of.get(key)
            if item is None:
                continue
            if self.ids[item] not in (-1, block):
                raise InvalidArgumentError(
                    f"operation {op.op_id} names block {block % MOST_BLOCKS} for a key that another"
                    " one has in another block; make a graph for each"
                )
            self.ids[item] = block

    def add(self, at: int, op: TransferOp, items: Sequence[int], *, is_promotion: bool) -> None:
        """What one operation becomes, batch by batch."""
        if op.transfer_type is TransferType.VIRTUAL:
            return
        worker = worker_for(self.workers, op.transfer_type)
        fill, empty = worker.fill(op.transfer_type), worker.empty(op.transfer_type)
        for batch, some in self._by_batch(items).items():
            after = self._before(op, batch)
            unread = tuple(item for item in some if item not in self.filled_by)
            if unread:
                self._push(at, Operation(fill.kind, unread, fill.tier, after, batch))
                for item in unread:
                    self.filled_by[item] = len(self.operations) - 1
            if is_promotion:
                continue  # behind the copy in, see `promote`
            ends = tuple(sorted({self.filled_by[item] for item in some} | set(after)))
            self._push(at, Operation(empty.kind, tuple(some), empty.tier, ends, batch))
            self._note_end(op, batch)

    def promote(self, at: int, op: TransferOp, items: Sequence[int]) -> None:
        """The puts of an operation that another one in the stage has read on already."""
        empty = worker_for(self.workers, op.transfer_type).empty(op.transfer_type)
        reads: dict[int, list[int]] = {}
        for place, operation in enumerate(self.operations):
            if operation.kind in (Kind.COPY_IN, Kind.GET):
                reads.setdefault(operation.batch, []).append(place)
        for batch, some in self._by_batch(items).items():
            after = tuple(reads[batch])
            self._push(
                at,
                Operation(empty.kind, tuple(some), empty.tier, after, batch, is_awaited=False),
            )

    def _by_batch(self, items: Sequence[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for batch, some in groupby(items, self.batch_of.__getitem__):
            found.setdefault(batch, []).extend(some)
        return found

    def _push(self, at: int, operation: Operation) -> None:
        self.operations.append(operation)
        self.op_at.append(at)

    def _note_end(self, op: TransferOp, batch: int) -> None:
        ends = self.last_of.setdefault(op.op_id, {})
        ends.setdefault(batch, []).append(len(self.operations) - 1)

    def _before(self, op: TransferOp, batch: int) -> tuple[int, ...]:
        """Block by block where a predecessor moves the same ones, else behind all of it."""
        before: set[int] = set()
        for predecessor in op.predecessors:
            ends = self.last_of.get(predecessor, {})
            before.update(ends[batch] if batch in ends else (i for e in ends.values() for i in e))
        return tuple(sorted(before))


class TransferScheduler:
    """Plans graphs for `workers`, `batch_blocks` at a time. Keeps nothing."""

    def __init__(self, workers: Sequence[TransferWorker], batch_blocks: int) -> None:
        if batch_blocks < 1:
            raise InvalidArgumentError(f"batches of {batch_blocks} blocks; give 1 or more")
        self._workers = tuple(workers)
        self._batch_blocks = batch_blocks

    def stages(self, graph: TransferOpGraph) -> list[Stage]:
        """What is to be run, one after the other. A graph without operations has none.

        Raises `InvalidArgumentError` for a cycle, a block named twice in one operation, and one
        that two operations have in two blocks of the engine; `UnsupportedError` for what no worker
        does.
        """
        order = graph.order()
        needed = graph.needed_for(graph.task_end_op_id) if graph.task_end_op_id in graph.ops else ()
        first = [op for op in order if not needed or op.op_id in needed]
        rest = [op for op in order if needed and op.op_id not in needed]
        return [self._stage(ops) for ops in (first, rest) if ops]

    def _stage(self, ops: list[TransferOp]) -> Stage:
        lowering = _Lowering(self._workers, self._batch_blocks)
        items_of = [lowering.items_of(op) for op in ops]
        read_on = _read_on(ops)
        for at, op in enumerate(ops):
            lowering.add(at, op, items_of[at], is_promotion=op.op_id in read_on)
        for at, op in enumerate(ops):
            if op.op_id in read_on:
                lowering.promote(at, op, items_of[at])
        items = lowering.item_of
        return Stage(
            Graph(lowering.operations, len(items)),
            b"".join(items),
            lowering.ids,
            lowering.parents,
            ops,
            lowering.op_at,
            items_of,
        )


def _read_on(ops: Sequence[TransferOp]) -> set[int]:
    """Operations into the CPU tier whose blocks go on to the engine in the same stage."""
    by_id: Mapping[int, TransferOp] = {op.op_id: op for op in ops}
    found: set[int] = set()
    for op in ops:
        if op.transfer_type is not TransferType.H2D:
            continue
        for before in op.predecessors:
            predecessor = by_id.get(before)
            if predecessor is None or predecessor.transfer_type not in (
                TransferType.DISK2H,
                TransferType.REMOTE2H,
            ):
                continue
            if set(predecessor.key_list()) <= set(op.key_list()):
                found.add(before)
    return found
