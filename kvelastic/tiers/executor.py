"""Runs transfer graphs: a thread for each store, and one for each direction of the pool's copies.

    executor = Executor(copies, staging, stores)
    run = executor.submit(Transfer(graph, keys, ids), Priority.LOAD)
    run.wait(0.5); run.loaded
    executor.close(timeout_s=5)

A store that hangs holds only its own thread and the slots of one batch. When a call has taken
`STUCK_S`, the executor fails that operation and all operations queued for that store. It also fails
new ones until the call returns. The pool's copies have no timeout, because they access blocks.

A store must not raise. If it does, the executor logs the error and treats the result as empty.
Slots are released only when all calls that use them have returned.

There is one lock, `_changed`. No call to a store or to the pool is made with it held. The lock of
`StagingSlots` is taken inside it. All methods are thread-safe.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from kvelastic import _vmm
from kvelastic.errors import IntegrityError, InvalidArgumentError, KvelasticError
from kvelastic.tiers.base import Store
from kvelastic.tiers.graph import FILLS_STAGING, NO_TIER, POOL_COPIES, Kind, Operation, State
from kvelastic.tiers.staging import StagingSlots
from kvelastic.tiers.transfer_run import Batch, Priority, Run, Transfer

_log = logging.getLogger("kvelastic")

STUCK_S = 10.0
"""Timeout of a call to a store."""
_LOOK_S = 0.25
"""Interval at which a thread that waits for a run checks for stalled stores."""

Loaded = Callable[[int, int, float], None]
"""Called after each successful read, with tier, blocks and seconds. Must be short."""


class BlockCopies(Protocol):
    """Copies between blocks and staging slots, one slot per block: a `_vmm.Pool`, or FlexKV's.

    The copies block and release the GIL. They raise `DriverError` if the device fails.
    """

    def copy_out(self, ids: Sequence[int], staging: _vmm.Staging, slots: Sequence[int]) -> None:
        """Copy blocks to slots."""

    def copy_in(self, staging: _vmm.Staging, slots: Sequence[int], ids: Sequence[int]) -> None:
        """Copy slots to blocks, which must be in use by the caller."""


class _Worker:
    """A thread, its queues and its current operation. Guarded by the executor's lock."""

    def __init__(self, name: str, tier: int, store: Store | None) -> None:
        self.name = name
        """The store's, or "out" or "in" for a direction of the pool's copies."""
        self.tier = tier
        self.store = store
        # Operations that fill staging slots have their own queue. If no slots are free, operations
        # that release slots must not wait behind them.
        self.filling: list[tuple[int, int, Run, int]] = []
        self.others: list[tuple[int, int, Run, int]] = []
        self.running: tuple[Run, int] | None = None
        self.began_s = 0.0
        self.is_given_up = False
        """Whether the current call has timed out and still hangs."""
        self.thread: threading.Thread | None = None


class Executor:
    """Runs transfers. Thread-safe."""

    def __init__(
        self,
        copies: BlockCopies,
        memory: _vmm.Staging,
        stores: Sequence[Store],
        *,
        clock: Callable[[], float] = time.monotonic,
        loaded: Loaded = lambda *_: None,
    ) -> None:
        """Starts the threads. `stores` are nearest first.

        The executor owns the stores: `close` closes them.
        """
        self.slots = StagingSlots(memory.slots)
        self._copies = copies
        self._memory = memory
        self._clock = clock
        self._loaded = loaded
        self._changed = threading.Condition()
        self._serial = 0
        self._runs: set[Run] = set()
        self._is_closing = False
        self._awaited_only = 0
        """Number of `only_awaited` contexts."""
        self._due: list[Callable[[], None]] = []
        """Callbacks of runs that have completed under the lock. See `_settling`."""
        self._pool_workers = {
            Kind.COPY_OUT: _Worker("out", NO_TIER, None),
            Kind.COPY_IN: _Worker("in", NO_TIER, None),
        }
        self._workers = [_Worker(store.name, tier, store) for tier, store in enumerate(stores)]
        for worker in self._all_workers:
            worker.thread = threading.Thread(
                target=self._work, args=(worker,), name=f"kvelastic-{worker.name}"[:15], daemon=True
            )
            worker.thread.start()

    @property
    def _all_workers(self) -> list[_Worker]:
        return [*self._pool_workers.values(), *self._workers]

    # --- public methods ------------------------------------------------------------------------

    def submit(self, transfer: Transfer, priority: Priority) -> Run:
        """Start a transfer and return its run. Never blocks.

        Raises `InvalidArgumentError` if the transfer is inconsistent, names a tier that does not
        exist, or has a batch with more items than there are slots.
        """
        transfer.check()
        for operation in transfer.graph.operations:
            if operation.tier >= len(self._workers):
                raise InvalidArgumentError(
                    f"tier {operation.tier} is not one of {len(self._workers)}; plan with those"
                )
        run = Run(self, transfer, priority, self._changed)
        for batch in run.batches.values():
            if len(batch.items) > self.slots.count:
                raise InvalidArgumentError(
                    f"a batch of {len(batch.items)} items needs as many staging slots, and there"
                    f" are {self.slots.count}; plan smaller batches"
                )
        self.look()
        with self._settling():
            self._runs.add(run)
            if self._awaited_only:
                self._drop_unawaited(run)
            ready = run.states.ready()
            if self._is_closing:
                self._cancel(run)
            else:
                self._enqueue(run, ready)
            self._settle(run)
        return run

    def wait(self, timeout_s: float | None, is_reached: Callable[[], bool]) -> bool:
        """Block until `is_reached` returns true, for at most `timeout_s` (None: no limit).

        Returns whether it did. `is_reached` is called with the lock held.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.look()
            with self._changed:
                if is_reached():
                    return True
                left_s = _LOOK_S
                if deadline_s is not None:
                    left_s = min(left_s, deadline_s - time.monotonic())
                    if left_s <= 0:
                        return False
                self._changed.wait(left_s)

    def cancel(self, run: Run) -> None:
        """Cancel a run; see `Run.cancel`."""
        with self._settling():
            self._cancel(run)
            self._settle(run)

    def look(self) -> None:
        """Fail the operations of stores that hang. Never blocks.

        Every query about a run calls it.
        """
        with self._settling():
            for worker in self._workers:
                if worker.running is None or worker.is_given_up:
                    continue
                took_s = self._clock() - worker.began_s
                if took_s < STUCK_S:
                    continue
                run, index = worker.running
                worker.is_given_up = True
                run.given_up.add(worker.tier)
                _log.warning(
                    "tier %s: a %s has been stalled for %.0f s; bypassing the tier until it"
                    " completes",
                    worker.name,
                    run.transfer.graph.operations[index].kind.value,
                    took_s,
                )
                # `cancel` may already have ended the operation, although its call still hangs.
                if run.states.of(index) is State.RUNNING:
                    self._enqueue(run, self._end(run, index))
                    self._settle(run)
                for queue in (worker.filling, worker.others):
                    for _, _, other, waiting in queue:
                        self._refuse(other, waiting)
                        self._settle(other)
                    queue.clear()

    @property
    def stuck_tiers(self) -> list[int]:
        """Indices of the tiers whose store hangs."""
        with self._changed:
            return [worker.tier for worker in self._workers if worker.is_given_up]

    def drain(self, timeout_s: float) -> bool:
        """Block until no transfer is open, for at most `timeout_s`. Returns whether none is."""
        return self.wait(
            timeout_s, lambda: not self._runs and not any(w.running for w in self._all_workers)
        )

    @contextmanager
    def only_awaited(self) -> Iterator[None]:
        """Return a context in which new transfers drop the operations that are not awaited."""
        with self._changed:
            self._awaited_only += 1
        try:
            yield
        finally:
            with self._changed:
                self._awaited_only -= 1

    def settle_unawaited(self, timeout_s: float) -> bool:
        """Cancel pending operations that are not awaited, then wait until no store is written to.

        Returns whether that was reached within `timeout_s`. Does not wait for stalled stores.
        Blocks.
        """
        with self._changed:
            for run in list(self._runs):
                self._drop_unawaited(run)
        return self.wait(timeout_s, lambda: not any(map(self._is_writing, self._workers)))

    @staticmethod
    def _is_writing(worker: _Worker) -> bool:
        if worker.running is None or worker.is_given_up:
            return False
        run, index = worker.running
        return run.transfer.graph.operations[index].kind is Kind.PUT

    def close(self, timeout_s: float = 5.0) -> list[str]:
        """Cancel all transfers, stop the threads and close the stores, each in its own thread.

        Waits at most `timeout_s` in total. Returns the names of the stores that hang; their threads
        are abandoned and keep their resources. Idempotent.
        """
        with self._settling():
            self._is_closing = True
            for run in list(self._runs):
                self._cancel(run)
                self._settle(run)
            self._changed.notify_all()
        deadline_s = time.monotonic() + timeout_s
        for worker in self._all_workers:
            if worker.thread is not None and worker.thread is not threading.current_thread():
                worker.thread.join(max(0.0, deadline_s - time.monotonic()))
        left = [
            worker.name if worker.store else "the pool's copies"
            for worker in self._all_workers
            if worker.thread is not None and worker.thread.is_alive()
        ]
        if left:
            _log.warning(
                "%s did not end within %.1f s and is left to the end of the process",
                ", ".join(left),
                timeout_s,
            )
        return left

    def check_integrity(self) -> None:
        """Check runs, batches and slots. Raises `IntegrityError` that names the first mismatch."""
        with self._changed:
            held: list[int] = []
            for run in self._runs:
                run.states.check_integrity()
                for number, batch in run.batches.items():
                    held += batch.slots.values()
                    open_ = sum(
                        1
                        for index in run.open_operations()
                        if run.transfer.graph.operations[index].batch == number
                        and run.transfer.graph.operations[index].kind is not Kind.DROP
                    )
                    if open_ != batch.open:
                        raise IntegrityError(
                            f"batch {number} counts {batch.open} open operations of {open_}"
                        )
            if len(set(held)) != len(held):
                raise IntegrityError(f"two batches have one of the staging slots {sorted(held)}")
            self.slots.check_integrity()
            if self.slots.free + len(held) != self.slots.count:
                raise IntegrityError(
                    f"{self.slots.free} staging slots are free and {len(held)} held, of"
                    f" {self.slots.count}"
                )

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Hold the lock, and afterwards call the callbacks of runs that completed under it."""
        with self._changed:
            yield
            due, self._due = self._due, []
        for call in due:
            call()

    # --- called with the lock held -------------------------------------------------------------

    def _worker_of(self, operation: Operation) -> _Worker:
        return self._pool_workers.get(operation.kind) or self._workers[operation.tier]

    def _enqueue(self, run: Run, ready: Sequence[int]) -> None:
        for index in ready:
            if run.states.of(index) is not State.PENDING:
                continue
            operation = run.transfer.graph.operations[index]
            if not run.items_for(operation):
                # No item remains, because predecessors failed or already did the work. End it now:
                # the thread may be busy with a slow store.
                self._enqueue(run, self._end(run, index))
                continue
            worker = self._worker_of(operation)
            if worker.is_given_up:
                self._refuse(run, index)
                continue
            self._serial += 1
            priority = run.priority if operation.is_awaited else Priority.BACKGROUND
            queue = worker.filling if operation.kind in FILLS_STAGING else worker.others
            heapq.heappush(queue, (priority, self._serial, run, index))
        self._changed.notify_all()

    def _refuse(self, run: Run, index: int) -> None:
        """Fail an operation, if it is ready, because its store hangs."""
        run.given_up.add(run.transfer.graph.operations[index].tier)
        if run.states.is_ready(index):
            run.states.start(index)
            self._enqueue(run, self._end(run, index))

    def _end(self, run: Run, index: int) -> list[int]:
        operation = run.transfer.graph.operations[index]
        freed = run.states.end(index)
        batch = run.batches[operation.batch]
        if operation.kind is not Kind.DROP:
            batch.open -= 1
        self._release(batch)
        if run.transfer.ended is not None:
            run.transfer.ended(index, run)
        return freed

    def _release(self, batch: Batch) -> None:
        if batch.open == 0 and batch.calls == 0 and batch.slots:
            self.slots.give_back(list(batch.slots.values()))
            batch.slots.clear()
            self._changed.notify_all()

    def _cancel(self, run: Run) -> None:
        run.is_cancelled = True
        operations = run.transfer.graph.operations
        for index in run.open_operations():
            # A running call to a store continues and keeps its slots. Its result is discarded.
            is_pending = run.states.of(index) is State.PENDING
            if is_pending or operations[index].kind not in POOL_COPIES:
                self._end(run, index)
        self._changed.notify_all()

    def _settle(self, run: Run) -> None:
        """Update the run after operations have ended. Called within `_settling`."""
        self._forget_if_over(run)
        if run.states.is_complete:
            self._changed.notify_all()
            self._due += [partial(run.call, callback) for callback in run.take_callbacks()]

    def _forget_if_over(self, run: Run) -> None:
        if run.states.is_over and not any(b.slots or b.calls for b in run.batches.values()):
            self._runs.discard(run)
            self._changed.notify_all()

    def _next(self, worker: _Worker) -> tuple[Run, int] | None:
        """Return the next operation of a worker, or None if none can start now."""
        self._drop_ended(worker.filling)
        self._drop_ended(worker.others)
        # At equal priority, operations that release slots go first.
        if worker.filling and (not worker.others or worker.filling[0][0] < worker.others[0][0]):
            _, _, run, index = worker.filling[0]
            if self._has_slots(run, index):
                heapq.heappop(worker.filling)
                return run, index
            # `_make_room` may have cancelled the head of this queue.
            self._drop_ended(worker.others)
        if worker.others:
            _, _, run, index = heapq.heappop(worker.others)
            return run, index
        return None

    @staticmethod
    def _drop_ended(queue: list[tuple[int, int, Run, int]]) -> None:
        while queue and queue[0][2].states.of(queue[0][3]) is not State.PENDING:
            heapq.heappop(queue)

    def _has_slots(self, run: Run, index: int) -> bool:
        batch = run.batches[run.transfer.graph.operations[index].batch]
        if batch.slots or not batch.items:
            return True
        slots = self.slots.take(len(batch.items))
        if slots is None and self._make_room(len(batch.items)):
            slots = self.slots.take(len(batch.items))
        if slots is None:
            return False
        batch.slots = dict(zip(batch.items, slots, strict=True))
        return True

    def _make_room(self, count: int) -> bool:
        """Cancel pending operations that are not awaited until `count` slots are free.

        Returns whether that many are free.
        """
        for run in sorted(self._runs, key=lambda run: -run.priority):
            if self.slots.free >= count:
                break
            if run.states.is_complete:
                self._drop_unawaited(run)
        return self.slots.free >= count

    def _drop_unawaited(self, run: Run) -> None:
        """Cancel the pending operations of a run that are not awaited."""
        for index in run.open_operations():
            operation = run.transfer.graph.operations[index]
            if not operation.is_awaited and run.states.of(index) is State.PENDING:
                self._end(run, index)
        self._forget_if_over(run)

    # --- the workers ---------------------------------------------------------------------------

    def _work(self, worker: _Worker) -> None:
        while True:
            with self._changed:
                while (job := self._next(worker)) is None and not self._is_closing:
                    self._changed.wait()
                if job is None:
                    break
                run, index = job
                operation = run.transfer.graph.operations[index]
                run.states.start(index)
                items = run.items_for(operation)
                run.batches[operation.batch].calls += 1
                worker.running = job
                worker.began_s = self._clock()
            self._call(worker, run, index, items)
        if worker.store is not None:
            try:
                worker.store.close()
            except Exception:
                _log.exception("tier %s could not be closed", worker.store.name)

    def _call(self, worker: _Worker, run: Run, index: int, items: list[int]) -> None:
        operation = run.transfer.graph.operations[index]
        batch = run.batches[operation.batch]
        began_s = time.perf_counter()
        try:
            went_well = self._carry_out(worker.store, run, operation, items, batch)
        except KvelasticError as error:
            went_well = []
            _log.warning(
                "%s of %d blocks failed, and they count as not there: %s: %s",
                operation.kind.value,
                len(items),
                error.code,
                error,
            )
        except Exception:
            went_well = []
            _log.exception(
                "%s of %d blocks failed in a way that its contract excludes; they count as not"
                " there",
                operation.kind.value,
                len(items),
            )
        took_s = time.perf_counter() - began_s
        if went_well and operation.kind is Kind.GET:
            self._loaded(operation.tier, len(items), took_s)
        with self._settling():
            worker.running = None
            worker.is_given_up = False
            batch.calls -= 1
            # Otherwise the operation timed out or was cancelled, so its result is discarded.
            if run.states.of(index) is State.RUNNING:
                self._note(run, operation, items, went_well)
                freed = self._end(run, index)
                if not run.is_cancelled:
                    self._enqueue(run, freed)
            else:
                self._release(batch)
            self._settle(run)
            self._changed.notify_all()

    def _carry_out(
        self, store: Store | None, run: Run, operation: Operation, items: list[int], batch: Batch
    ) -> list[int]:
        """Run the operation for `items`, without the lock. Returns the items that succeeded.

        `store` is None for a copy of the pool. Raises the errors of the store or the copy.
        """
        transfer = run.transfer
        slots = [batch.slots[item] for item in items] if batch.slots else []
        if operation.kind is Kind.COPY_IN:
            self._copies.copy_in(self._memory, slots, [transfer.ids[item] for item in items])
            return items
        if operation.kind is Kind.COPY_OUT:
            self._copies.copy_out([transfer.ids[item] for item in items], self._memory, slots)
            if transfer.confirm is None:
                return items
            stood_still = transfer.confirm()
            return [item for item in items if stood_still[item]]
        assert store is not None
        if operation.kind is Kind.DROP:
            store.erase(transfer.keys_of(items))
            return items
        if operation.kind is Kind.GET:
            views = [self._memory.view(slot) for slot in slots]
            whole = store.get(transfer.keys_of(items), views)
            return [item for item, is_whole in zip(items, whole, strict=True) if is_whole]
        stored: list[int] = []
        for chain, parent in run.chains(items):
            views = [self._memory.view(batch.slots[item]) for item in chain]
            taken = store.put(transfer.keys_of(chain), views, chain_after=parent)
            stored += [item for item, is_taken in zip(chain, taken, strict=True) if is_taken]
        return stored

    @staticmethod
    def _note(run: Run, operation: Operation, items: list[int], went_well: list[int]) -> None:
        if operation.kind in FILLS_STAGING:
            for item in items:
                run.staged[item] = False
            for item in went_well:
                run.staged[item] = True
        elif operation.kind is Kind.COPY_IN:
            for item in went_well:
                run.loaded[item] = True
        elif operation.kind is Kind.PUT:
            for item in went_well:
                run.stored[item].add(operation.tier)
