"""Requests as tasks: match, plan, launch, wait. `common.calls` describes the calls.

    UNREADY -- launch --> RUNNING --> COMPLETED        nothing to move: COMPLETED at once
       |                     |-----> FAILED            some block was not moved
       '------- cancel ------'-----> CANCELLED

An UNREADY task has holds and space in the tiers: launch or cancel every id that a match
returned. A task is COMPLETED when the engine can continue. For a get, the data is in the engine's
blocks. For a put, the blocks have been read; writes to farther tiers continue after that.

Lock order: `_life` (a start or a shutdown), `_lock`, the transfer engine's lock, the stores' locks.
Any thread may call.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from kvelastic.config import Config, load
from kvelastic.errors import (
    InvalidArgumentError,
    MessageError,
    NotInitializedError,
    TransferError,
)
from kvelastic.flexkv.cache.cache_engine import (
    GlobalCacheEngine,
    Plan,
    blocks_of_slots,
    slots_of_plan,
)
from kvelastic.flexkv.common import calls
from kvelastic.flexkv.common.calls import Calls
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig, check_supported
from kvelastic.flexkv.common.hash_utils import Tokens
from kvelastic.flexkv.common.request import KVRequestType, KVResponse, KVResponseStatus, Mask
from kvelastic.flexkv.common.ring_buffer import RingBuffer
from kvelastic.flexkv.common.storage import KVCacheLayout
from kvelastic.flexkv.common.tracer import Tracer
from kvelastic.flexkv.common.transfer import GRAPH_END, BlockIds, DeviceType, TransferOpStatus
from kvelastic.flexkv.storage.allocator import engine_blocks
from kvelastic.flexkv.storage.storage_engine import StorageEngine
from kvelastic.flexkv.transfer.transfer_engine import TransferEngine
from kvelastic.flexkv.transfer.worker import GPUCPUTransferWorker
from kvelastic.messages import Message

_log = logging.getLogger("kvelastic")

EXPIRY_S: Final = 30 * 60.0
MOST_TASKS: Final = 100_000
"""Beyond either limit the oldest task is dropped and releases its holds and space."""
RECENT_TASKS: Final = 256
"""Number of ended tasks kept for `common.debug`."""
RESET_S: Final = 60.0


class TaskStatus(Enum):
    """The state of a task. The last three are final."""

    UNREADY = "unready"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


_ENDS: Final = {
    TaskStatus.COMPLETED: KVResponseStatus.SUCCESS,
    TaskStatus.CANCELLED: KVResponseStatus.CANCELLED,
    TaskStatus.FAILED: KVResponseStatus.FAILED,
}


@dataclass(eq=False, slots=True)
class KVTask:
    """One request. The engine's lock guards it.

    The plan has the keys and ids of the blocks. It is dropped when its graph ends; the result
    stays.
    """

    task_id: int
    task_type: KVRequestType
    plan: Plan
    dp_id: int
    created_s: float
    ended_s: float | None = None
    status: TaskStatus = TaskStatus.UNREADY
    graph_is_over: bool = False
    """Whether all copies have ended, including those after the task's end."""
    moved: Mask | None = None
    """For each block of the plan, whether it was moved. None: all were, or the task runs."""

    @property
    def is_over(self) -> bool:
        """Whether the status is final."""
        return self.status in _ENDS

    def mask(self, tokens_per_block: int) -> Mask:
        """Return a mask that is True for tokens that were moved or will be."""
        if self.moved is None:
            return self.plan.mask()
        # A prompt cannot use blocks after a missing one.
        is_put = self.task_type is KVRequestType.PUT
        moved = self.moved if is_put else np.logical_and.accumulate(self.moved)
        mask, first = np.zeros(self.plan.length, np.bool_), self.plan.first_token
        mask[first : first + len(moved) * tokens_per_block] = np.repeat(moved, tokens_per_block)
        return mask


class KVTaskEngine(Calls):
    """Tasks over one set of tiers, in this process."""

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        *,
        settings: Config | None = None,
        clock: Callable[[], float] = time.monotonic,
        first_task_id: int = 1,
    ) -> None:
        """Check the configuration; `start` opens the tiers.

        `settings` are kvelastic's own (None: from the environment). Task ids count up from
        `first_task_id`. Raises `ConfigError` and `UnsupportedError`.
        """
        check_supported(model_config, cache_config)
        self.model_config = copy(model_config)
        self.cache_config = cache_config
        self._settings = load() if settings is None else settings
        self._clock = clock
        self._life = threading.RLock()  # held during a start or a shutdown; taken before `_lock`
        self._lock = threading.RLock()
        self._task_ids = itertools.count(first_task_id)
        self._tasks: dict[int, KVTask] = {}
        self._by_graph: dict[int, KVTask] = {}
        self._open: dict[int, KVTask] = {}
        """The tasks that run or have holds or space."""
        self._batches: dict[int, list[int]] = {}
        """The tasks of each batch."""
        self.recent: RingBuffer[KVTask] = RingBuffer(RECENT_TASKS)
        self._tracer: Tracer | None = None
        self._storage: StorageEngine | None = None
        self._is_shut = False

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the tiers and start the threads. Blocks while stores open. Idempotent.

        After `shutdown`, tensors must be registered again, and earlier tasks are unknown. Raises
        the error of a store that cannot be opened; nothing stays open then.
        """
        with self._life, self._lock:
            if self._storage is not None:
                return
            for table in (self._tasks, self._by_graph, self._open, self._batches):
                table.clear()
            if self.cache_config.trace_path is not None:
                self._tracer = Tracer(
                    self.cache_config.trace_path,
                    tokens_per_block=self.cache_config.tokens_per_block,
                )
            storage = StorageEngine(self.model_config, self.cache_config, self._settings)
            worker = GPUCPUTransferWorker(
                part_bytes=storage.part_bytes,
                tp_size=self.model_config.tp_size,
                is_shared=self.model_config.ranks_in_a_record < self.model_config.tp_size,
            )
            self.transfer_engine = TransferEngine(storage.stores, worker, storage.staging)
            self.cache_engine = GlobalCacheEngine(
                storage, lambda tier: tier not in self.transfer_engine.stuck_tiers
            )
            self._storage = storage

    @property
    def storage(self) -> StorageEngine:
        """The tiers. Raises `NotInitializedError` before `start` and after `shutdown`."""
        storage = self._storage
        if storage is None:
            when = "after shutdown()" if self._is_shut else "before start()"
            raise NotInitializedError(f"a call came {when}; call start() of a KVManager first")
        return storage

    def is_ready(self) -> bool:
        """Whether it is started and every rank of every client has registered their tensors."""
        if self._storage is None:
            return False
        worker = self.transfer_engine.gpu_worker
        return all(worker.is_registered(client) for client in range(self.model_config.clients))

    def register_kv_caches(
        self,
        kv_caches: Sequence[Any],
        layout: KVCacheLayout,
        dp_client_id: int = 0,
        tp_rank: int = 0,
    ) -> None:
        """Register a rank's KV tensors: one for all layers, or one for each.

        They are NumPy arrays or torch tensors, referenced until `shutdown`.
        Kernels that write a block must have finished before a put of it is launched. Raises
        `InvalidArgumentError` if tensors, layout and model disagree.
        """
        _ = self.storage
        self.model_config.check_client(dp_client_id)
        blocks = engine_blocks(kv_caches, layout, self._settings)
        worker = self.transfer_engine.gpu_worker
        worker.register(dp_client_id, tp_rank, blocks, keep=list(kv_caches))

    def forget_client(self, dp_client_id: int) -> None:
        """Cancel and forget the tasks of a client that has exited.

        Writes to farther tiers of tasks that have ended for the client go on.
        """
        with self._lock:
            self._pump()
            tasks = [task for task in self._tasks.values() if task.dp_id == dp_client_id]
            running = [task.task_id for task in tasks if not task.is_over]
        self._cancel(running)
        with self._lock:
            for task in tasks:
                self._tasks.pop(task.task_id, None)
            self._batches = {
                one: ids
                for one, ids in self._batches.items()
                if not self._tasks.keys().isdisjoint(ids)
            }

    def shutdown(self) -> None:
        """Cancel all tasks, close the tiers and end the threads. Idempotent. Blocks."""
        with self._life:
            self._is_shut = True
            if self._storage is None:
                return
            with self._lock:
                ids = list(self._tasks)
            self._cancel(ids)
            with self._lock:
                self._storage = None
                tasks = list(self._tasks.values())
            for task in tasks:
                task.plan.abort()
            self.cache_engine.close()
            self.transfer_engine.shutdown()
            if self._tracer is not None:
                self._tracer.close()

    # --- calls ---------------------------------------------------------------------------------

    def ask(self, call: Message, dp_id: int = 0, owner: int | None = None) -> Any:
        """Run a call. Raises `NotInitializedError` before `start` and after `shutdown`.

        With an `owner`, tasks of other clients are unknown. See `Calls.ask` for the results.
        """
        self.model_config.check_client(dp_id)
        _ = self.storage
        if isinstance(call, calls.Match):
            return self._match_of(call, dp_id)
        if isinstance(call, calls.Launch):
            return calls.Started(self._launch(call, owner))
        if isinstance(call, calls.Wait):
            return self._wait(call, owner)
        if isinstance(call, calls.Cancel):
            if late := self._cancel(call.task_ids, owner):
                raise TransferError(
                    f"copies of the tasks {late} have not ended, so their blocks are in use; cancel"
                    " these tasks again before you use the blocks"
                )
        elif isinstance(call, calls.Reset):
            self._reset()
        else:
            raise MessageError(f"a {type(call).__name__} is no call of a task engine")
        return calls.Done()

    def may_block(self, call: Message) -> bool:
        """Whether a call may wait for a copy, or for a tier's file system or server."""
        if isinstance(call, calls.Match):
            return self.cache_engine.asks_medium
        if isinstance(call, calls.Cancel):
            with self._lock:
                return any(self._may_be_copied(one) for one in call.task_ids)
        return not isinstance(call, calls.Launch)

    def _may_be_copied(self, task_id: int) -> bool:
        task = self._tasks.get(task_id)
        if task is None:
            return task_id in self._batches
        return task.status is not TaskStatus.UNREADY and not task.graph_is_over

    def _reset(self) -> None:
        with self._lock:
            ids = list(self._open)
        self._cancel(ids)
        # Stores may still be writing blocks of cancelled tasks, which a reset would miss.
        self.transfer_engine.stop_writing(RESET_S)
        self._pump()
        late = self.cache_engine.reset(RESET_S)
        if late:
            _log.warning("the tiers %s did not forget within %.0f s", ", ".join(late), RESET_S)

    def _match_of(self, call: calls.Match, dp_id: int) -> calls.Matched:
        self._pump()
        kind = KVRequestType(call.kind)
        sequence = self.cache_engine.sequence(call.tokens, call.namespace)
        if kind is KVRequestType.PUT:
            plan = self.cache_engine.plan_put(sequence, call.mask, dp_id=dp_id)
        else:
            plan = self.cache_engine.plan_get(
                sequence,
                call.mask,
                dp_id=dp_id,
                cpu_only=call.cpu_only,
                is_prefetch=kind is KVRequestType.PREFETCH,
            )
        task = self._add(kind, plan, dp_id)
        if self._tracer is not None:
            found = (plan.first_token if plan.tokens else 0, plan.tokens)
            self._tracer.match(
                kind, task.task_id, sequence.token_ids, plan.wanted, call.namespace, found
            )
        try:
            if call.slots is not None:
                slots = slots_of_plan(plan, call.mask, call.slots)
                self._launch(calls.Launch([task.task_id], [slots], False))
            elif kind is KVRequestType.PREFETCH:
                with self._lock:
                    self._submit([] if task.is_over else [task])
        except BaseException:
            self._cancel([task.task_id])
            raise
        end = plan.first_token + plan.tokens
        return calls.Matched(task.task_id, plan.length, plan.first_token, end)

    def _add(self, task_type: KVRequestType, plan: Plan, dp_id: int) -> KVTask:
        with self._lock:
            now_s = self._clock()
            task = KVTask(next(self._task_ids), task_type, plan, dp_id, now_s)
            self._tasks[task.task_id] = self._open[task.task_id] = task
            if not plan.graph.ops:
                task.status = TaskStatus.COMPLETED
                self._end_graph(task)
            self._expire(now_s)
            return task

    def _expire(self, now_s: float) -> None:
        """Drop tasks beyond the limits. The lock is held."""
        while self._tasks:
            oldest = next(iter(self._tasks.values()))
            if len(self._tasks) <= MOST_TASKS and now_s - oldest.created_s < EXPIRY_S:
                return
            del self._tasks[oldest.task_id]
            if oldest.status is TaskStatus.UNREADY:
                self._end_graph(oldest)

    def _end_graph(self, task: KVTask) -> None:
        """Release what a task holds, after all copies have ended. The lock is held."""
        task.graph_is_over = True
        task.plan.keep_mask()
        self._open.pop(task.task_id, None)

    # --- launching -----------------------------------------------------------------------------

    def _launch(self, call: calls.Launch, owner: int | None = None) -> list[int]:
        if len(call.slots) != len(call.task_ids):
            raise InvalidArgumentError(
                f"{len(call.task_ids)} tasks and {len(call.slots)} slot mappings; pass one for each"
            )
        with self._lock:
            self._pump()
            bound = [
                self._check_launch(self._own(task_id, owner), task_id, slots)
                for task_id, slots in zip(call.task_ids, call.slots, strict=True)
            ]
            wanted = [one for one in bound if one is not None]
            tasks = [task for task, _ in wanted]
            for task, blocks in wanted:
                task.plan.graph.bind_engine_blocks(blocks)
            self._submit(tasks)
            if self._tracer is not None:
                self._tracer.tasks("launch", [task.task_id for task in tasks])
            if not call.as_batch:
                return list(call.task_ids)
            batch_id = next(self._task_ids)
            self._batches[batch_id] = list(call.task_ids)
            while len(self._batches) > MOST_TASKS:
                del self._batches[next(iter(self._batches))]
            return [batch_id]

    def _own(self, task_id: int, owner: int | None) -> KVTask | None:
        """Return a task, unless it is another client's. The lock is held."""
        task = self._tasks.get(task_id)
        return task if task is not None and owner in (None, task.dp_id) else None

    def _check_launch(
        self, task: KVTask | None, task_id: int, slots: Tokens
    ) -> tuple[KVTask, BlockIds] | None:
        """Return the task and its blocks; None if there is nothing to copy. The lock is held."""
        if task is None:
            raise InvalidArgumentError(
                f"task {task_id} is not known or none of this client's; launch what a match"
                " returned"
            )
        if task.status is TaskStatus.COMPLETED and not task.plan.tokens:
            return None
        if task.status is not TaskStatus.UNREADY:
            raise InvalidArgumentError(
                f"task {task_id} is {task.status.value}; a task is launched once"
            )
        if len(slots) != task.plan.tokens:
            raise InvalidArgumentError(
                f"slot_mapping of task {task_id} has {len(slots)} slots for {task.plan.tokens} True"
                " tokens of its mask; pass exactly those, in order"
            )
        blocks = blocks_of_slots(slots, self.cache_config.tokens_per_block)
        worker = self.transfer_engine.gpu_worker
        worker.check(task.dp_id, blocks, f"slot_mapping of task {task_id}")
        if len(np.unique(blocks)) != len(blocks):
            raise InvalidArgumentError(
                f"slot_mapping of task {task_id} names a block twice; each block of tokens has one"
                " of its own"
            )
        return task, blocks

    def _submit(self, tasks: Sequence[KVTask]) -> None:
        """Submit the tasks' graphs: all or none. The lock is held."""
        for task in tasks:
            self._by_graph[task.plan.graph.graph_id] = task
        try:
            self.transfer_engine.plan_and_submit([task.plan.graph for task in tasks])
        except BaseException:
            for task in tasks:
                self._by_graph.pop(task.plan.graph.graph_id, None)
            raise
        for task in tasks:
            task.status = TaskStatus.RUNNING

    def _cancel(self, task_ids: Iterable[int], owner: int | None = None) -> list[int]:
        """Cancel tasks. Return those with a copy that does not end, so that blocks are in use."""
        running = []
        with self._lock:
            self._pump()
            ids = [one for each in task_ids for one in self._batches.get(each, [each])]
            if self._tracer is not None:
                self._tracer.tasks("cancel", ids)
            for task_id in ids:
                task = self._own(task_id, owner)
                if task is None or task.graph_is_over:
                    continue
                if task.status is TaskStatus.UNREADY:
                    self._end_graph(task)
                else:
                    running.append(task)
                if not task.is_over:
                    self._end(task, TaskStatus.CANCELLED)
        late = [
            task.task_id
            for task in running
            if not self.transfer_engine.cancel(task.plan.graph.graph_id)
        ]
        if late:
            _log.warning("copies of the tasks %s do not end; their blocks are in use", late)
        return late

    # --- waiting -------------------------------------------------------------------------------

    def _wait(self, call: calls.Wait, owner: int | None) -> dict[int, KVResponse]:
        deadline_s = time.monotonic() + (call.timeout_s or 0.0)
        while True:
            seen = self.transfer_engine.events
            left_s = deadline_s - time.monotonic()
            answers = self.answers(call, owner, is_late=left_s <= 0)
            if answers is not None:
                return answers
            self.transfer_engine.wait_for_event(seen, left_s)

    def answers(
        self, call: calls.Wait, owner: int | None = None, *, is_late: bool
    ) -> dict[int, KVResponse] | None:
        """Return the responses; None if a task still runs and it is not too late to wait for it.

        With an `owner`, tasks of other clients are unknown.
        """
        with self._lock:
            self._pump()
            answers = {one: self._answer(one, call.completely, owner) for one in call.task_ids}
        if call.timeout_s is None:
            return {task_id: answer for task_id, answer in answers.items() if answer}
        if None in answers.values() and not is_late:
            return None
        return {
            task_id: answer or KVResponse(KVResponseStatus.TIMEOUT, task_id)
            for task_id, answer in answers.items()
        }

    def _answer(self, task_id: int, completely: bool, owner: int | None) -> KVResponse | None:
        """Return the response; None if the task has not ended. The lock is held."""
        members = self._batches.get(task_id)
        if members is not None:
            answers = [self._answer(one, completely, owner) for one in members]
            known = [answer for answer in answers if answer is not None]
            if len(known) < len(answers):
                return None
            failed = [a.status for a in known if a.status is not KVResponseStatus.SUCCESS]
            masks = tuple(answer.return_mask for answer in known)
            status = failed[0] if failed else KVResponseStatus.SUCCESS
            return KVResponse(status, task_id, masks[0] if masks else None, masks)
        task = self._own(task_id, owner)
        if task is None:
            return KVResponse(KVResponseStatus.NOTFOUND, task_id)
        if task.status is TaskStatus.UNREADY:
            return KVResponse(KVResponseStatus.UNREADY, task_id)
        must_be_over = completely or task.task_type is KVRequestType.PREFETCH
        if not task.is_over or (must_be_over and not task.graph_is_over):
            return None
        mask = task.mask(self.cache_config.tokens_per_block)
        return KVResponse(_ENDS[task.status], task_id, mask)

    def _pump(self) -> None:
        with self._lock:
            for graph_id, op_id in self.transfer_engine.get_completed_graphs_and_ops(timeout=0):
                task = self._by_graph.get(graph_id)
                if task is None:
                    continue
                if op_id in (task.plan.graph.task_end_op_id, GRAPH_END):
                    self._note_end(task)
                if op_id == GRAPH_END:
                    del self._by_graph[graph_id]
                    self._end_graph(task)

    def _note_end(self, task: KVTask) -> None:
        """Handle the end of the operation that the caller waits for. The lock is held."""
        task.plan.release_leases()
        if task.is_over:
            return
        ops = task.plan.graph.ops
        if task.task_type is KVRequestType.PREFETCH:
            reads = iter(ops.values())
            task.moved = np.ones(sum(one.blocks for one in task.plan.fragments), np.bool_)
            for device, first, count in task.plan.fragments:
                if device is not DeviceType.CPU:
                    task.moved[first : first + count] = next(reads).moved
            is_whole = bool(task.moved.all())
        else:
            end = ops[task.plan.graph.task_end_op_id]
            is_whole = end.status is TransferOpStatus.COMPLETED
            task.moved = None if is_whole else np.array(end.moved, np.bool_)
        self._end(task, TaskStatus.COMPLETED if is_whole else TaskStatus.FAILED)

    def _end(self, task: KVTask, status: TaskStatus) -> None:
        task.status = status
        task.ended_s = self._clock()
        self.recent.append(task)
        if status is TaskStatus.CANCELLED:
            task.moved = np.zeros(0, np.bool_)

    # --- state ---------------------------------------------------------------------------------

    @property
    def open_tasks(self) -> int:
        """Number of tasks that run or have holds or space."""
        with self._lock:
            self._pump()
            return len(self._open)

    def list_open(self, dp_client_id: int | None = None) -> list[KVTask]:
        """Return the tasks that run or have holds or space, or those of one client. Linear."""
        with self._lock:
            self._pump()
            return [task for task in self._open.values() if dp_client_id in (None, task.dp_id)]

    def seconds_of(self, task: KVTask) -> float:
        """Return the time from a task's match to its end, or until now."""
        return (self._clock() if task.ended_s is None else task.ended_s) - task.created_s

    def status_of(self, task_id: int) -> TaskStatus | None:
        """Return the state of a task; None if it is unknown."""
        with self._lock:
            self._pump()
            task = self._tasks.get(task_id)
            return None if task is None else task.status

    def check_integrity(self) -> None:
        """Check all parts. Raises `IntegrityError`. Blocks."""
        self._pump()
        self.transfer_engine.check_integrity()
        self.cache_engine.check_integrity()
