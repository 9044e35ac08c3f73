"""Runs graphs of operations on the tiers' executor and reports their ends.

    engine.submit_transfer_graph(graph)
    engine.get_completed_graphs_and_ops(timeout=1.0)     # [(graph_id, op_id), ..., (graph_id, -1)]

A block that a store cannot move is False in `TransferOp.moved`; it never raises.

Lock: `_done` is taken under the executor's lock, so no call of the executor is made while it is
held. Any thread may call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvelastic import _vmm
from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.flexkv.common.transfer import (
    GRAPH_END,
    DeviceType,
    TransferOp,
    TransferOpGraph,
    TransferOpStatus,
)
from kvelastic.flexkv.transfer.scheduler import Stage, TransferScheduler
from kvelastic.flexkv.transfer.worker import GPUCPUTransferWorker
from kvelastic.tiers.base import Hold, Store
from kvelastic.tiers.executor import Executor
from kvelastic.tiers.transfer_run import Priority, Run, Transfer
from kvelastic.tiers.workers import Workers

_log = logging.getLogger("kvelastic")

BATCH_BLOCKS = 8
"""Minimum blocks per batch: a disk needs that many concurrently."""
BATCH_BYTES = 4 << 20
"""Bytes per batch of small blocks. Smaller batches would cost more in calls than in copying.

Larger ones would delay the first copy.
"""
CLOSE_S = 5.0
_LOOK_S = 0.25


class _Flight:
    """A submitted graph. The engine's lock guards it."""

    def __init__(self, graph: TransferOpGraph) -> None:
        self.graph = graph
        self.stages: list[Stage] | None = None
        """None: not planned yet."""
        self.run: Run | None = None
        """The run of the current stage; None before it is submitted."""
        self.open: Counter[int] = Counter()
        """By op id: the executor's operations that have not ended."""
        self.is_last = False
        """Whether no further stage will begin."""
        self.is_cancelled = False
        self.is_over = False

    @property
    def is_begun(self) -> bool:
        """Whether the executor has the run of a stage, or the graph has ended."""
        return self.run is not None or self.is_over


class TransferEngine:
    """Runs transfers. Owns the stores and the threads until `shutdown`. Any thread may call."""

    def __init__(
        self,
        stores: Mapping[DeviceType, Store],
        gpu_worker: GPUCPUTransferWorker,
        staging: _vmm.Staging,
    ) -> None:
        """`stores` are ordered from the nearest tier to the farthest."""
        self._cpu = stores[DeviceType.CPU]
        self.gpu_worker = gpu_worker
        batch_blocks = min(
            max(BATCH_BLOCKS, BATCH_BYTES // staging.record_bytes), max(1, staging.slots // 4)
        )
        tiers = {device: place for place, device in enumerate(stores)}
        self._scheduler = TransferScheduler(tiers, batch_blocks)
        self._executor = Executor(gpu_worker, staging, list(stores.values()))
        self._done = threading.Condition()
        self._flights: dict[int, _Flight] = {}
        self._completed: list[tuple[int, int]] = []
        self._events = 0
        self.on_event: Callable[[], None] = lambda: None
        """Called at each end, with the lock held. Must not block."""
        self._is_closed = False
        self._planner = Workers("flexkv-plan")

    # --- submitting ----------------------------------------------------------------------------

    def submit_transfer_graph(
        self, transfer_graph: TransferOpGraph | Sequence[TransferOpGraph]
    ) -> None:
        """Start one or several graphs: all or none. Never blocks.

        Raises `InvalidArgumentError` for a graph that was submitted before, has a cycle or is
        inconsistent, `UnsupportedError` for an unsupported operation, and `NotInitializedError` for
        blocks of a client that has not registered its tensors.
        """
        if isinstance(transfer_graph, TransferOpGraph):
            transfer_graph = [transfer_graph]
        for graph in transfer_graph:
            self._check(graph)
        planned = [self._scheduler.stages(graph) for graph in transfer_graph]
        for flight, stages in zip(self._register(transfer_graph), planned, strict=True):
            self._begin(flight, stages)

    def plan_and_submit(self, graphs: Sequence[TransferOpGraph]) -> None:
        """Start graphs, but plan them in a thread, so that large graphs do not block the caller.

        A graph that cannot be planned fails. Raises `InvalidArgumentError` for a graph that was
        submitted before.
        """
        for flight in self._register(graphs):
            plan = partial(self._plan, flight)
            if self._planner.submit(plan) is None:  # the system has no thread left
                plan()

    def _register(self, graphs: Sequence[TransferOpGraph]) -> list[_Flight]:
        new = {graph.graph_id: _Flight(graph) for graph in graphs}
        with self._done:
            if len(new) < len(graphs) or new.keys() & self._flights.keys():
                raise InvalidArgumentError(f"one of the graphs {list(new)} is on its way already")
            self._flights.update(new)
        return list(new.values())

    def _plan(self, flight: _Flight) -> None:
        try:
            self._begin(flight, self._scheduler.stages(flight.graph))
        except Exception:
            _log.exception("graph %d cannot be carried out", flight.graph.graph_id)
            with self._done:
                self._drop(flight, TransferOpStatus.FAILED)

    def _check(self, graph: TransferOpGraph) -> None:
        for op in graph.ops.values():
            if op.status is not TransferOpStatus.PENDING:
                raise InvalidArgumentError(
                    f"operation {op.op_id} is {op.status.value} already; make a new graph"
                )
            if op.engine_side is not None:
                self.gpu_worker.check(op.dp_id, op.engine_side, f"operation {op.op_id}")

    def _begin(self, flight: _Flight, stages: list[Stage]) -> None:
        with self._done:
            if flight.is_over:  # cancelled before it was planned
                return
            flight.stages = stages
            flight.open = Counter(op.op_id for stage in stages for op in stage.op_of)
        self._begin_stage(flight, 0)

    def _begin_stage(self, flight: _Flight, number: int) -> None:
        with self._done:
            assert flight.stages is not None
            if number == len(flight.stages) or flight.is_cancelled:
                self._drop(flight, TransferOpStatus.CANCELLED)
                return
            stage = flight.stages[number]
            flight.run = None
        # Keep what an earlier stage has stored until it is copied on.
        hold = self._cpu.hold(stage.keys) if number else Hold()
        transfer = Transfer(
            stage.graph,
            stage.keys,
            stage.ids,
            stage.parents,
            ended=lambda index, run: self._note_end(flight, stage, stage.op_of[index], run),
        )
        priority = Priority.LOAD if stage.is_awaited else Priority.BACKGROUND
        try:
            run = self._executor.submit(transfer, priority)
        except BaseException:
            hold.release()
            with self._done:
                self._drop(flight, TransferOpStatus.FAILED)
            raise
        with self._done:
            flight.run = run
            for op in stage.ops:
                if op.status is TransferOpStatus.PENDING:
                    op.status = TransferOpStatus.RUNNING
            is_cancelled = flight.is_cancelled
            self._done.notify_all()  # for `cancel`
        if is_cancelled:
            run.cancel()
        run.on_complete(lambda run: self._end_stage(flight, number, hold))

    def _end_stage(self, flight: _Flight, number: int, hold: Hold) -> None:
        hold.release()
        with self._done:
            assert flight.stages is not None
            for op in flight.stages[number].ops:
                if not op.num_blocks:  # VIRTUAL
                    self._complete(flight, op, TransferOpStatus.COMPLETED)
        self._begin_stage(flight, number + 1)

    def _drop(self, flight: _Flight, status: TransferOpStatus) -> None:
        """End the operations that have not begun, and the graph after the last running one.

        The lock is held.
        """
        if flight.is_over:
            return
        flight.is_last = True
        for op in flight.graph.ops.values():
            if op.status is TransferOpStatus.PENDING:
                flight.open.pop(op.op_id, None)
                op.moved = [False] * op.num_blocks
                self._complete(flight, op, status)
        self._end_if_over(flight)

    # --- the executor's thread -----------------------------------------------------------------

    def _note_end(self, flight: _Flight, stage: Stage, op: TransferOp, run: Run) -> None:
        """Handle the end of one of the executor's operations. The executor's lock is held."""
        with self._done:
            flight.open[op.op_id] -= 1
            if flight.open[op.op_id] == 0:
                del flight.open[op.op_id]
                op.moved = stage.moved(op, run)
                status = TransferOpStatus.COMPLETED
                if not all(op.moved):
                    is_cancelled = run.is_cancelled or flight.is_cancelled
                    status = TransferOpStatus.CANCELLED if is_cancelled else TransferOpStatus.FAILED
                self._complete(flight, op, status)
            self._end_if_over(flight)

    def _complete(self, flight: _Flight, op: TransferOp, status: TransferOpStatus) -> None:
        op.status = status
        self._report(flight, op.op_id)

    def _end_if_over(self, flight: _Flight) -> None:
        if not flight.open and flight.is_last and not flight.is_over:
            flight.is_over = True
            del self._flights[flight.graph.graph_id]
            self._report(flight, GRAPH_END)

    def _report(self, flight: _Flight, op_id: int) -> None:
        self._completed.append((flight.graph.graph_id, op_id))
        self._events += 1
        self._done.notify_all()
        self.on_event()

    # --- waiting -------------------------------------------------------------------------------

    def _wait(self, timeout_s: float, is_reached: Callable[[], object]) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._executor.look()
            with self._done:
                left_s = min(_LOOK_S, deadline_s - time.monotonic())
                if is_reached() or left_s <= 0:
                    return bool(is_reached())
                self._done.wait(left_s)

    def get_completed_graphs_and_ops(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """Return (graph_id, op_id) of each end since the last call; op_id -1 is the graph's end.

        Waits for the first end, up to `timeout` seconds (None: as long as a graph is running).
        Results are in the operation's `status` and `moved`.
        """
        timeout_s = float("inf") if timeout is None else timeout
        self._wait(timeout_s, lambda: self._completed or not self._flights)
        with self._done:
            completed, self._completed = self._completed, []
            return completed

    @property
    def events(self) -> int:
        """Number of ends so far, for `wait_for_event`."""
        with self._done:
            return self._events

    def wait_for_event(self, seen: int, timeout_s: float) -> None:
        """Wait until `events` differs from `seen`, up to `timeout_s`."""
        self._wait(timeout_s, lambda: self._events != seen)

    def cancel(self, graph_id: int, timeout_s: float = CLOSE_S) -> bool:
        """Stop a graph; return whether its engine blocks are unused now.

        Waits for a copy in progress, up to `timeout_s`.
        """
        with self._done:
            flight = self._flights.get(graph_id)
            if flight is None:
                return True
            flight.is_cancelled = True
            if flight.stages is None:
                self._drop(flight, TransferOpStatus.CANCELLED)
            elif not self._done.wait_for(lambda: flight.is_begun, timeout_s):
                return False
            run = flight.run
        if run is None:
            return True
        run.cancel()
        return run.wait(timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no graph runs and no store is in use, even for cancelled graphs.

        Returns whether that was reached within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        are_over = self._wait(timeout_s, lambda: not self._flights)
        return are_over and self._executor.drain(max(0.0, deadline_s - time.monotonic()))

    def stop_writing(self, timeout_s: float) -> bool:
        """Wait until no store is written to, except hanging ones; return whether none is.

        The caller must not submit graphs during the call.
        """
        return self._executor.settle_unawaited(timeout_s)

    @property
    def stuck_tiers(self) -> list[int]:
        """The indices of tiers whose store hangs."""
        return self._executor.stuck_tiers

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the executor's state or the counts are inconsistent."""
        self._executor.check_integrity()
        with self._done:
            for graph_id, flight in self._flights.items():
                if flight.is_over or min(flight.open.values(), default=1) < 1:
                    raise IntegrityError(f"graph {graph_id} counts {dict(flight.open)} operations")

    def shutdown(self, timeout_s: float = CLOSE_S) -> list[str]:
        """Cancel all graphs, end the threads, close the stores; return hanging parts.

        Idempotent.
        """
        with self._done:
            for flight in list(self._flights.values()):
                flight.is_cancelled = True
                if flight.stages is None:
                    self._drop(flight, TransferOpStatus.CANCELLED)
            if self._is_closed:
                return []
            self._is_closed = True
        self._planner.close(timeout_s)
        return self._executor.close(timeout_s)
