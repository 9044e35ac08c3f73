"""Carries graphs of operations out, and says what is over.

    engine.submit_transfer_graph(graph)
    engine.get_completed_graphs_and_ops(timeout=1.0)     # [(graph_id, op_id), ..., (graph_id, -1)]

The work is the tiers' executor's: a thread for the engine's copies and one for each store. What a
medium cannot do is a miss of those blocks (`TransferOp.moved`), never an exception.

Lock: one, `_done`; it is taken under the executor's, so nothing of the executor is called with it
held. Any thread may call anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.flexkv.common.transfer import (
    ENDS,
    GRAPH_END,
    DeviceType,
    TransferOp,
    TransferOpGraph,
    TransferOpStatus,
)
from kvelastic.flexkv.transfer.scheduler import Stage, TransferScheduler
from kvelastic.flexkv.transfer.worker import (
    CPURemoteTransferWorker,
    CPUSSDDiskTransferWorker,
    GPUCPUTransferWorker,
    TransferWorker,
)
from kvelastic.tiers.base import Lease, Store
from kvelastic.tiers.executor import Executor
from kvelastic.tiers.pool_side import StagingMemory
from kvelastic.tiers.run import Priority, Run, Transfer

_log = logging.getLogger("kvelastic")

BATCH_BLOCKS = 8
"""Blocks of one call, at least: deep enough for a disk."""
BATCH_BYTES = 4 << 20
"""Small blocks go in larger batches: copied in a millisecond, a batch of 8 would cost more in calls
and threads than in bytes. Not more, so that the first blocks are copied early."""
CLOSE_S = 5.0
_LOOK_S = 0.25


class _Flight:
    """A graph on its way. The engine's lock guards all but `graph` and `stages`."""

    def __init__(self, graph: TransferOpGraph) -> None:
        self.graph = graph
        self.stages: list[Stage] = []
        self.is_planned = False
        self.stage = -1
        """The one that runs; -1 before the first."""
        self.run: Run | None = None
        self.open: list[list[int]] = []
        """Operations of the executor that have not ended, for each operation of each stage."""
        self.left = 0
        self.is_cancelled = False
        self.is_over = False

    def plan(self, stages: list[Stage]) -> None:
        """It becomes these."""
        self.stages = stages
        counts = [Counter(stage.op_at) for stage in stages]
        self.open = [
            [count[at] for at in range(len(stage.ops))]
            for count, stage in zip(counts, stages, strict=True)
        ]
        self.left = sum(map(sum, self.open))
        self.is_planned = True

    @property
    def is_begun(self) -> bool:
        """Whether a run of the executor says from now on what becomes of it."""
        return self.run is not None or self.is_over


class TransferEngine:
    """See the module. `stores` and what it starts end with `shutdown`."""

    def __init__(
        self,
        stores: Mapping[DeviceType, Store],
        gpu_worker: GPUCPUTransferWorker,
        staging: StagingMemory,
        tiers: Mapping[DeviceType, int],
    ) -> None:
        """`tiers` says which place each device has; the stores are the engine's from now on."""
        self._tiers = dict(tiers)
        self._stores = stores
        self.gpu_worker = gpu_worker
        workers: list[TransferWorker] = [gpu_worker]
        if DeviceType.SSD in tiers:
            workers.append(CPUSSDDiskTransferWorker(tiers))
        if DeviceType.REMOTE in tiers:
            workers.append(CPURemoteTransferWorker(tiers))
        batch_blocks = min(
            max(BATCH_BLOCKS, BATCH_BYTES // staging.record_bytes), max(1, staging.slots // 4)
        )
        self._scheduler = TransferScheduler(workers, batch_blocks)
        ordered = sorted(tiers, key=lambda device: self._tiers[device])
        self._executor = Executor(gpu_worker, staging, [stores[device] for device in ordered])
        self._done = threading.Condition()
        self._flights: dict[int, _Flight] = {}
        self._completed: list[tuple[int, int]] = []
        self._events = 0
        self._is_closed = False
        self._to_plan: SimpleQueue[_Flight | None] = SimpleQueue()
        self._planner = threading.Thread(target=self._plan_all, name="flexkv-plan", daemon=True)
        self._planner.start()

    # --- giving work ---------------------------------------------------------------------------

    def submit_transfer_graph(
        self, transfer_graph: TransferOpGraph | Sequence[TransferOpGraph]
    ) -> None:
        """Begin a graph, or several: all or none. Never blocks.

        Raises `InvalidArgumentError` for one that was submitted before, has a cycle or does not fit
        together, `UnsupportedError` for an operation that no worker does, `NotInitializedError`
        where it copies blocks of a client that has not registered its tensors.
        """
        if isinstance(transfer_graph, TransferOpGraph):
            transfer_graph = [transfer_graph]
        flights = [self._checked(graph) for graph in transfer_graph]
        for flight in flights:
            flight.plan(self._scheduler.stages(flight.graph))
        self._register(flights)
        for flight in flights:
            self._begin_stage(flight, 0)

    def plan_and_submit(self, graphs: Sequence[TransferOpGraph]) -> None:
        """The same, but that a thread plans them: the caller is not kept for large graphs.

        What the plan finds wrong with a graph fails its operations.
        """
        flights = [self._checked(graph) for graph in graphs]
        self._register(flights)
        for flight in flights:
            self._to_plan.put(flight)

    def _register(self, flights: Sequence[_Flight]) -> None:
        with self._done:
            for at, flight in enumerate(flights):
                graph_id = flight.graph.graph_id
                if graph_id in self._flights:
                    for begun in flights[:at]:
                        del self._flights[begun.graph.graph_id]
                    raise InvalidArgumentError(f"graph {graph_id} is on its way already")
                self._flights[graph_id] = flight

    def _plan_all(self) -> None:
        """The planner's thread."""
        while (flight := self._to_plan.get()) is not None:
            try:
                stages = self._scheduler.stages(flight.graph)
                with self._done:
                    if flight.is_over:  # cancelled before its turn
                        continue
                    flight.plan(stages)
                self._begin_stage(flight, 0)
            except Exception:
                _log.exception("graph %d cannot be carried out", flight.graph.graph_id)
                with self._done:
                    self._drop(flight, TransferOpStatus.FAILED)

    def _checked(self, graph: TransferOpGraph) -> _Flight:
        for op in graph.ops.values():
            if op.status is not TransferOpStatus.PENDING:
                raise InvalidArgumentError(
                    f"operation {op.op_id} is {op.status.value} already; make a new graph"
                )
            ids = op.engine_side
            if ids is not None and len(ids):
                count = self.gpu_worker.block_count(op.dp_id)
                if not (int(ids.min()) >= 0 and int(ids.max()) < count):
                    raise InvalidArgumentError(
                        f"operation {op.op_id} names blocks {int(ids.min())} to {int(ids.max())} of"
                        f" {count}; bind it to blocks of the engine before it is submitted"
                    )
        return _Flight(graph)

    def _begin_stage(self, flight: _Flight, number: int) -> None:
        lease: Lease | None = None
        with self._done:
            flight.stage = number
            if number == len(flight.stages) or flight.is_cancelled:
                self._drop_rest(flight, number)
                return
            stage = flight.stages[number]
            for op in stage.ops:
                op.status = TransferOpStatus.RUNNING
        if number:  # what the first stage has put stays until it has gone on
            lease = self._stores[DeviceType.CPU].lease(stage.keys)
        transfer = Transfer(
            stage.graph,
            stage.keys,
            stage.ids,
            stage.parents,
            ended=lambda index, run: self._note_end(flight, number, index, run),
        )
        run = self._executor.submit(transfer, Priority.BACKGROUND if number else Priority.LOAD)
        with self._done:
            flight.run = run
            is_cancelled = flight.is_cancelled
            self._done.notify_all()  # for `cancel` and `drain`
        if is_cancelled:
            run.cancel()
        run.on_complete(lambda run: self._end_stage(flight, number, lease))

    def _end_stage(self, flight: _Flight, number: int, lease: Lease | None) -> None:
        if lease is not None:
            lease.release()
        self._begin_stage(flight, number + 1)

    def _drop_rest(self, flight: _Flight, number: int) -> None:
        """No stage comes any more; what is left of them is cancelled. The lock is held."""
        for dropped in range(number, len(flight.stages)):
            for at, op in enumerate(flight.stages[dropped].ops):
                flight.left -= flight.open[dropped][at]
                flight.open[dropped][at] = 0
                op.moved = [False] * op.num_blocks
                self._complete(flight, op, TransferOpStatus.CANCELLED)
        for stage in flight.stages[:number]:
            for op in stage.ops:  # those that join others and move nothing
                if op.status is TransferOpStatus.RUNNING and not op.num_blocks:
                    self._complete(flight, op, TransferOpStatus.COMPLETED)
        flight.stage = len(flight.stages)
        self._end_if_over(flight)

    def _drop(self, flight: _Flight, status: TransferOpStatus) -> None:
        """Nothing of it has begun, and nothing will. The lock is held."""
        if flight.is_over:
            return
        for op in flight.graph.ops.values():
            op.moved = [False] * op.num_blocks
            self._complete(flight, op, status)
        flight.left, flight.open, flight.stage = 0, [], len(flight.stages)
        self._end_if_over(flight)

    # --- what the executor says ----------------------------------------------------------------

    def _note_end(self, flight: _Flight, number: int, index: int, run: Run) -> None:
        """An operation of the executor has ended. Its lock is held."""
        stage = flight.stages[number]
        at = stage.op_at[index]
        with self._done:
            flight.open[number][at] -= 1
            flight.left -= 1
            if flight.open[number][at] == 0:
                op = stage.ops[at]
                op.moved = stage.moved(at, run, self._tiers[DeviceType.CPU], self._target_tier(op))
                status = TransferOpStatus.COMPLETED
                if not all(op.moved):
                    is_cancelled = run.is_cancelled or flight.is_cancelled
                    status = TransferOpStatus.CANCELLED if is_cancelled else TransferOpStatus.FAILED
                self._complete(flight, op, status)
            self._end_if_over(flight)

    def _target_tier(self, op: TransferOp) -> int:
        return self._tiers.get(ENDS[op.transfer_type][1], -1)

    def _complete(self, flight: _Flight, op: TransferOp, status: TransferOpStatus) -> None:
        op.status = status
        self._say(flight.graph.graph_id, op.op_id)

    def _end_if_over(self, flight: _Flight) -> None:
        if flight.left == 0 and flight.stage >= len(flight.stages) and not flight.is_over:
            flight.is_over = True
            del self._flights[flight.graph.graph_id]
            self._say(flight.graph.graph_id, GRAPH_END)

    def _say(self, graph_id: int, op_id: int) -> None:
        self._completed.append((graph_id, op_id))
        self._events += 1
        self._done.notify_all()

    # --- asking --------------------------------------------------------------------------------

    def get_completed_graphs_and_ops(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """(graph_id, op_id) of what is over since the last call; op_id -1 is the graph itself.

        Waits until there is something, `timeout` seconds at most (None: as long as anything is on
        its way). Whether an operation has moved its blocks stands in its `moved` and `status`.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            self._executor.look()
            with self._done:
                left_s = _LOOK_S
                if deadline_s is not None:
                    left_s = min(left_s, deadline_s - time.monotonic())
                if self._completed or left_s <= 0 or not self._flights:
                    completed, self._completed = self._completed, []
                    return completed
                self._done.wait(left_s)

    @property
    def events(self) -> int:
        """How much was over so far; see `wait_for_event`."""
        with self._done:
            return self._events

    def wait_for_event(self, seen: int, timeout_s: float) -> None:
        """Until `events` is another number than `seen`, `timeout_s` at most. Takes nothing."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._executor.look()
            with self._done:
                left_s = min(_LOOK_S, deadline_s - time.monotonic())
                if self._events != seen or left_s <= 0:
                    return
                self._done.wait(left_s)

    def cancel(self, graph_id: int, timeout_s: float = CLOSE_S) -> bool:
        """Begin nothing more of a graph; answers whether the engine's blocks are left alone now.

        Waits for the one copy of them that may be under way, `timeout_s` at most.
        """
        with self._done:
            flight = self._flights.get(graph_id)
            if flight is None:
                return True
            flight.is_cancelled = True
            if not flight.is_planned:
                self._drop(flight, TransferOpStatus.CANCELLED)
            elif not self._done.wait_for(lambda: flight.is_begun, timeout_s):
                return False
            run = flight.run
        if run is None:
            return True
        run.cancel()
        return run.wait(timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no store is called any more, not even for what was cancelled. As `settle`."""
        deadline_s = time.monotonic() + timeout_s
        with self._done:
            flights = list(self._flights.values())
            if not self._done.wait_for(lambda: all(one.is_begun for one in flights), timeout_s):
                return False
        return self._executor.drain(max(0.0, deadline_s - time.monotonic()))

    def stop_writing(self, timeout_s: float) -> bool:
        """Wait until no store is being written to; answers whether that was reached.

        Nobody submits meanwhile. A store that hangs is not waited for.
        """
        return self._executor.settle_unawaited(timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait until no graph is on its way, `timeout_s` at most; answers whether that is so.

        What a store is still doing for a cancelled one is not waited for: its result is dropped.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._executor.look()
            with self._done:
                left_s = min(_LOOK_S, deadline_s - time.monotonic())
                if not self._flights:
                    return True
                if left_s <= 0:
                    return False
                self._done.wait(left_s)

    @property
    def stuck_tiers(self) -> list[int]:
        """Tiers whose store hangs."""
        return self._executor.stuck_tiers

    def check_integrity(self) -> None:
        """The executor's own check, and that counts agree. Raises `IntegrityError`."""
        self._executor.check_integrity()
        with self._done:
            for graph_id, flight in self._flights.items():
                if flight.left != sum(map(sum, flight.open)):
                    raise IntegrityError(f"graph {graph_id} counts {flight.left} open operations")

    def shutdown(self, timeout_s: float = CLOSE_S) -> list[str]:
        """Cancel all, end the threads and close the stores. Answers what hangs. Repeatable."""
        with self._done:
            for flight in list(self._flights.values()):
                flight.is_cancelled = True
                if not flight.is_planned:
                    self._drop(flight, TransferOpStatus.CANCELLED)
            if self._is_closed:
                return []
            self._is_closed = True
        self._to_plan.put(None)
        self._planner.join()
        return self._executor.close(timeout_s)
