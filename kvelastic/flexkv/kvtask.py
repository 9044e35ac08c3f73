"""Requests as tasks: matched, planned, launched, waited for.

    UNREADY -- launch --> RUNNING --> COMPLETED        nothing to move: COMPLETED at once
       |                     |-----> FAILED            some block was not moved
       '------- cancel ------'-----> CANCELLED

A task in UNREADY holds what its plan needs: every id that a match returned is launched or
cancelled. A task is COMPLETED when the engine may go on: a get when the data is in its blocks, a
put when they have been read. What a put still writes to farther tiers goes on behind that.

Locks: `_lock`; the transfer engine's and the stores' are taken inside. `_life` is held around it by
a start or a shutdown. Any thread may call anything.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np

from kvelastic.config import Config, load
from kvelastic.errors import InvalidArgumentError, NotInitializedError, UnsupportedError
from kvelastic.flexkv.cache.cache_engine import (
    ALL_LAYERS,
    GlobalCacheEngine,
    Plan,
    blocks_of_slots,
    check_layers,
    put_blocks,
    slots_of_plan,
    wanted_blocks,
)
from kvelastic.flexkv.common.arguments import (
    launched,
    namespace_names,
    request_tokens,
    task_id_list,
    wait_seconds,
)
from kvelastic.flexkv.common.block import SequenceMeta
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig, check_supported
from kvelastic.flexkv.common.debug import TaskRecord
from kvelastic.flexkv.common.hash_utils import Tokens
from kvelastic.flexkv.common.request import KVRequestType, KVResponse, KVResponseStatus, Mask
from kvelastic.flexkv.common.ring_buffer import RingBuffer
from kvelastic.flexkv.common.storage import KVCacheLayout, StorageHandle
from kvelastic.flexkv.common.tracer import Tracer
from kvelastic.flexkv.common.transfer import (
    GRAPH_END,
    BlockIds,
    DeviceType,
    TransferOpStatus,
)
from kvelastic.flexkv.storage.allocator import GPUAllocator
from kvelastic.flexkv.storage.storage_engine import StorageEngine
from kvelastic.flexkv.transfer.transfer_engine import TransferEngine
from kvelastic.flexkv.transfer.worker import GPUCPUTransferWorker
from kvelastic.tiers.base import Store

_log = logging.getLogger("kvelastic")

EXPIRY_S: Final = 30 * 60.0
MOST_TASKS: Final = 100_000
"""Beyond either a task is forgotten, the oldest first; what it holds is given back."""
RECENT_TASKS: Final = 256
"""How many of those that are over are remembered for `common.debug`."""
RESET_S: Final = 60.0
WAIT_S: Final = 20.0


class TaskStatus(Enum):
    """Where a task is. The last three are ends."""

    UNREADY = "unready"
    READY = "ready"
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

    Its plan, which has the keys and ids of all its blocks, ends with its graph: a task that is over
    keeps its result alone, for as long as somebody may ask for it.
    """

    task_id: int
    task_type: KVRequestType
    plan: Plan
    dp_id: int
    created_s: float
    status: TaskStatus = TaskStatus.UNREADY
    graph_is_over: bool = False
    """Whether nothing of it is on its way any more, also behind its end."""
    moved: Mask | None = None
    """For each block of the plan whether it was moved; None: all, or it is not over."""
    callbacks: list[Callable[[KVResponse], None]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether its result stands."""
        return self.status in _ENDS

    def mask(self, tokens_per_block: int) -> Mask:
        """What was moved, or is to be."""
        if self.moved is None:
            return self.plan.mask()
        if self.task_type is KVRequestType.PUT:
            mask = self.plan.mask(0)
            first = self.plan.first_token
            rows = np.repeat(self.moved, tokens_per_block)
            mask[first : first + len(rows)] = rows
            return mask
        # What follows a block that is missing is of no use to a prompt.
        lead = len(self.moved) if self.moved.all() else int(self.moved.argmin())
        return self.plan.mask(lead * tokens_per_block)

    def end_graph(self) -> None:
        """Nothing of it is on its way any more: give back what its plan holds."""
        self.graph_is_over = True
        self.plan = self.plan.ended()


class KVTaskEngine:
    """Tasks over one set of tiers, in this process. See the module."""

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        *,
        settings: Config | None = None,
        clock: Callable[[], float] = time.monotonic,
        first_task_id: int = 1,
    ) -> None:
        """Checks the configuration; `start` opens the tiers.

        `settings` are kvelastic's own (None: from the environment). Task ids count up from
        `first_task_id`. Raises `ConfigError` and
        `UnsupportedError`.
        """
        check_supported(model_config, cache_config)
        self.model_config = copy(model_config)
        self.cache_config = cache_config
        self._settings = load() if settings is None else settings
        self._clock = clock
        self._life = threading.RLock()  # a start or a shutdown runs; taken before `_lock`
        self._lock = threading.RLock()
        self._task_ids = itertools.count(first_task_id)
        self._tasks: dict[int, KVTask] = {}
        self._by_graph: dict[int, KVTask] = {}
        self._batches: dict[int, list[int]] = {}
        self._called_back: deque[tuple[Callable[[KVResponse], None], KVResponse]] = deque()
        self._recent: RingBuffer[TaskRecord] = RingBuffer(RECENT_TASKS)
        self._tracer: Tracer | None = None
        self._storage: StorageEngine | None = None
        self._is_shut = False
        self._part_bytes = 0

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the tiers and start the threads. Blocks as long as stores need. Idempotent.

        After `shutdown` it starts anew: tensors are to be registered again, and tasks of before are
        not found. Raises what a store raises that cannot be opened; nothing is left open then.
        """
        with self._life, self._lock:
            if self._storage is not None and not self._is_shut:
                return
            self._tasks.clear()
            self._by_graph.clear()
            self._batches.clear()
            if self.cache_config.trace_path is not None:
                self._tracer = Tracer(
                    self.cache_config.trace_path,
                    tokens_per_block=self.cache_config.tokens_per_block,
                )
            storage = StorageEngine(self.model_config, self.cache_config, self._settings)
            worker = GPUCPUTransferWorker(
                storage.tiers,
                part_bytes=storage.part_bytes,
                tp_size=self.model_config.tp_size,
                is_shared=self.model_config.ranks_in_a_record < self.model_config.tp_size,
            )
            self.transfer_engine = TransferEngine(
                storage.stores, worker, storage.staging, storage.tiers
            )
            self.cache_engine = GlobalCacheEngine(
                storage, lambda tier: tier not in self.transfer_engine.stuck_tiers
            )
            self._storage, self._is_shut = storage, False

    @property
    def storage(self) -> StorageEngine:
        """The tiers. Raises `NotInitializedError` before `start` and after `shutdown`."""
        storage = self._storage
        if storage is None or self._is_shut:
            when = "after shutdown()" if self._is_shut else "before start()"
            raise NotInitializedError(f"a call came {when}; call start() of a KVManager first")
        return storage

    @property
    def expected_clients(self) -> int:
        """Data-parallel clients that are to register their tensors."""
        return self.model_config.dp_size * self.model_config.instance_num

    def is_ready(self) -> bool:
        """Whether it is started and every rank of every client has registered its tensors."""
        if self._storage is None or self._is_shut:
            return False
        worker = self.transfer_engine.gpu_worker
        return all(worker.is_registered(client) for client in range(self.expected_clients))

    def register_kv_caches(
        self,
        kv_caches: Sequence[Any],
        layout: KVCacheLayout,
        dp_client_id: int = 0,
        tp_rank: int = 0,
    ) -> None:
        """A rank's KV tensors: one for all layers, or one for each.

        Arrays of NumPy or tensors of torch, contiguous; they are kept until `release_client`. What
        a launch names is copied by then: kernels that write a block must have finished before a put
        of it is launched. Raises `InvalidArgumentError` where tensors, layout and model disagree.
        """
        handle = GPUAllocator.from_tensors(layout, kv_caches, self._settings)
        self.register_storage(handle, dp_client_id, tp_rank, keep=list(kv_caches))

    def register_storage(
        self, handle: StorageHandle, dp_client_id: int, tp_rank: int, keep: Any = None
    ) -> None:
        """The same for memory that was mapped into this process; `keep` keeps it mapped."""
        _ = self.storage
        self._check_client(dp_client_id)
        self.transfer_engine.gpu_worker.register(dp_client_id, tp_rank, handle.data, keep)

    def _check_client(self, dp_client_id: int) -> None:
        is_number = isinstance(dp_client_id, int) and not isinstance(dp_client_id, bool)
        if not is_number or not 0 <= dp_client_id < self.expected_clients:
            raise InvalidArgumentError(
                f"data-parallel client {dp_client_id!r} is not one of {self.expected_clients}; set"
                " dp_size and instance_num of ModelConfig"
            )

    def release_client(self, dp_client_id: int) -> None:
        """A client is gone: cancel its tasks, give back what they hold, let go of its tensors."""
        with self._lock:
            ids = [task.task_id for task in self._tasks.values() if task.dp_id == dp_client_id]
        self.cancel(ids)
        self.transfer_engine.gpu_worker.unregister(dp_client_id)

    def reset(self) -> None:
        """Forget all blocks in all tiers; tasks on their way become CANCELLED. Blocks.

        For new weights. A tier that does not answer within a minute is logged; nothing of it from
        before is found in any case.
        """
        _ = self.storage
        with self._lock:
            ids = [task.task_id for task in self._tasks.values() if not task.graph_is_over]
        self.cancel(ids)
        # A store may still be busy with what was cancelled; what it stores would stay behind.
        self.transfer_engine.stop_writing(RESET_S)
        self._pump()
        late = self.cache_engine.reset(RESET_S)
        if late:
            _log.warning("the tiers %s did not forget within %.0f s", ", ".join(late), RESET_S)

    def shutdown(self) -> None:
        """Cancel what is on its way, close the tiers, end the threads. Idempotent. Blocks."""
        with self._life:
            with self._lock:
                is_started = self._storage is not None and not self._is_shut
                ids = list(self._tasks)
            if is_started:
                self.cancel(ids)
            with self._lock:
                self._is_shut = True
                tasks = list(self._tasks.values())
            if is_started:
                for task in tasks:
                    task.plan.abort()
                self.cache_engine.close()
                self.transfer_engine.shutdown()
                if self._tracer is not None:
                    self._tracer.close()

    # --- matching ------------------------------------------------------------------------------

    def get_match(
        self,
        token_ids: Any,
        token_mask: Any = None,
        layer_granularity: int = ALL_LAYERS,
        dp_id: int = 0,
        *,
        cpu_only: bool = False,
        namespace: Sequence[str] | None = None,
        swa_aware: bool = False,
    ) -> tuple[int, Mask]:
        """(task id, mask of the tokens that are there). See `KVManager.get_match`."""
        check_layers(ALL_LAYERS, layer_granularity)
        refuse_sliding(swa_aware=swa_aware)
        self._check_client(dp_id)
        _ = self.storage
        self._pump()
        namespace = namespace_names(namespace)
        sequence = self.cache_engine.sequence(request_tokens(token_ids), namespace)
        first, last = wanted_blocks(token_mask, sequence)
        plan = self.cache_engine.plan_get(sequence, first, last, dp_id=dp_id, cpu_only=cpu_only)
        task = self._add(KVRequestType.GET, plan, dp_id)
        if self._tracer is not None:
            self._trace_match(self._tracer, task, sequence, first, last, namespace)
        return task.task_id, plan.mask()

    def put_match(
        self,
        token_ids: Any,
        token_mask: Any = None,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> tuple[int, Mask]:
        """(task id, mask of the tokens that are not there). See `KVManager.put_match`."""
        self._check_client(dp_id)
        _ = self.storage
        self._pump()
        namespace = namespace_names(namespace)
        sequence = self.cache_engine.sequence(request_tokens(token_ids), namespace)
        last = put_blocks(token_mask, sequence)
        plan = self.cache_engine.plan_put(sequence, last, dp_id=dp_id)
        task = self._add(KVRequestType.PUT, plan, dp_id)
        if self._tracer is not None:
            self._trace_match(self._tracer, task, sequence, 0, last, namespace)
        return task.task_id, plan.mask()

    @staticmethod
    def _trace_match(
        tracer: Tracer,
        task: KVTask,
        sequence: SequenceMeta,
        first: int,
        last: int,
        namespace: Sequence[str] | None,
    ) -> None:
        plan, per_block = task.plan, sequence.tokens_per_block
        tracer.match(
            task.task_type,
            task.task_id,
            sequence.token_ids,
            (first * per_block, last * per_block),
            namespace,
            (plan.first_token if plan.tokens else 0, plan.tokens),
        )

    def get_async(
        self,
        token_ids: Any,
        slot_mapping: Any,
        token_mask: Any = None,
        layer_granularity: int = ALL_LAYERS,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> int:
        """Match, bind and launch at once; the mask comes in the response."""
        task_id, _ = self.get_match(
            token_ids, token_mask, layer_granularity, dp_id, namespace=namespace
        )
        return self._launch_at_once(task_id, token_mask, slot_mapping)

    def put_async(
        self,
        token_ids: Any,
        slot_mapping: Any,
        token_mask: Any = None,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> int:
        """Match, bind and launch at once; the mask comes in the response."""
        task_id, _ = self.put_match(token_ids, token_mask, dp_id, namespace=namespace)
        return self._launch_at_once(task_id, token_mask, slot_mapping)

    def _launch_at_once(self, task_id: int, token_mask: Any, slot_mapping: Any) -> int:
        plan = self._tasks[task_id].plan
        try:
            self.launch(task_id, slots_of_plan(plan, token_mask, slot_mapping))
        except BaseException:
            self.cancel(task_id)
            raise
        return task_id

    def prefetch_async(
        self,
        token_ids: Any,
        namespace: Sequence[str] | None = None,
        swa_aware: bool = False,
    ) -> int:
        """Bring what lies farther away into the CPU tier; no block of the engine is touched."""
        refuse_sliding(swa_aware=swa_aware)
        _ = self.storage
        self._pump()
        namespace = namespace_names(namespace)
        sequence = self.cache_engine.sequence(request_tokens(token_ids), namespace)
        plan = self.cache_engine.plan_get(sequence, 0, sequence.num_blocks, is_prefetch=True)
        task = self._add(KVRequestType.PREFETCH, plan, 0)
        if self._tracer is not None:
            blocks = sequence.num_blocks
            self._trace_match(self._tracer, task, sequence, 0, blocks, namespace)
        with self._lock:
            if not task.is_over:
                self._submit([task])
        return task.task_id

    def _add(self, task_type: KVRequestType, plan: Plan, dp_id: int) -> KVTask:
        with self._lock:
            now_s = self._clock()
            task = KVTask(next(self._task_ids), task_type, plan, dp_id, now_s)
            if not plan.graph.ops:
                task.status = TaskStatus.COMPLETED
                task.end_graph()
            self._tasks[task.task_id] = task
            self._expire(now_s)
            return task

    def _expire(self, now_s: float) -> None:
        """The oldest are in front. The lock is held."""
        while self._tasks:
            oldest = next(iter(self._tasks.values()))
            if len(self._tasks) <= MOST_TASKS and now_s - oldest.created_s < EXPIRY_S:
                return
            del self._tasks[oldest.task_id]
            if oldest.status in (TaskStatus.UNREADY, TaskStatus.READY):
                oldest.plan.abort()

    # --- launching -----------------------------------------------------------------------------

    def launch(
        self,
        task_ids: int | Iterable[int],
        slot_mappings: Any,
        swa_slot_mappings: Any = None,
        as_batch: bool = False,
        layerwise_transfer: bool = False,
        counter_id: int = 0,
    ) -> list[int]:
        """Begin tasks with the slots of their masks' True tokens. See `KVManager.launch`."""
        refuse_sliding(swa_slot_mappings=swa_slot_mappings)
        refuse_layerwise(layerwise_transfer)
        _ = self.storage
        ids, slots = launched(task_ids, slot_mappings)
        with self._lock:
            self._pump()
            bound = [self._check_launch(at, own) for at, own in zip(ids, slots, strict=True)]
            wanted = [(task, blocks) for task, blocks in bound if blocks is not None]
            for task, blocks in wanted:
                assert blocks is not None
                task.plan.graph.bind_engine_blocks(blocks)
                task.status = TaskStatus.READY
            self._submit([task for task, _ in wanted])
            if self._tracer is not None:
                self._tracer.launch([task.task_id for task, _ in wanted])
            if not as_batch:
                return ids
            batch_id = next(self._task_ids)
            self._batches[batch_id] = ids
            while len(self._batches) > MOST_TASKS:
                del self._batches[next(iter(self._batches))]
            return [batch_id]

    def _check_launch(self, task_id: int, slots: Tokens) -> tuple[KVTask, BlockIds | None]:
        """The task and its blocks; None where there is nothing to launch. The lock is held."""
        task = self._tasks.get(task_id)
        if task is None:
            raise InvalidArgumentError(f"task {task_id} is not known; launch what a match returned")
        if task.status is TaskStatus.COMPLETED and not task.plan.tokens:
            return task, None
        if task.status not in (TaskStatus.UNREADY, TaskStatus.READY):
            raise InvalidArgumentError(
                f"task {task_id} is {task.status.value}; a task is launched once"
            )
        if len(slots) != task.plan.tokens:
            raise InvalidArgumentError(
                f"slot_mapping of task {task_id} has {len(slots)} slots for {task.plan.tokens} True"
                " tokens of its mask; pass exactly those, in order"
            )
        blocks = blocks_of_slots(slots, self.cache_config.tokens_per_block)
        count = self.transfer_engine.gpu_worker.block_count(task.dp_id)
        if int(blocks.max()) >= count:
            raise InvalidArgumentError(
                f"slot_mapping of task {task_id} names block {int(blocks.max())} of {count}"
            )
        if len(np.unique(blocks)) != len(blocks):
            raise InvalidArgumentError(
                f"slot_mapping of task {task_id} names a block twice; each block of tokens has one"
                " of its own"
            )
        return task, blocks

    def _submit(self, tasks: Sequence[KVTask]) -> None:
        """The lock is held."""
        for task in tasks:
            self._by_graph[task.plan.graph.graph_id] = task
        try:
            self.transfer_engine.plan_and_submit([task.plan.graph for task in tasks])
        except BaseException:
            for task in tasks:
                del self._by_graph[task.plan.graph.graph_id]
            raise
        for task in tasks:
            task.status = TaskStatus.RUNNING

    def cancel(self, task_ids: int | Iterable[int]) -> None:
        """Give tasks up. Ids that are not known, or over, are left alone.

        One that was never launched gives back what it holds. Of a running one nothing more is
        begun, and the one copy that may be under way is waited for: its blocks are the caller's
        when this returns.
        """
        _ = self.storage
        running = []
        with self._lock:
            self._pump()
            ids = self._members(task_ids)
            if self._tracer is not None:
                self._tracer.cancel(ids)
            for task_id in ids:
                task = self._tasks.get(task_id)
                if task is None or task.graph_is_over:
                    continue
                if task.status in (TaskStatus.UNREADY, TaskStatus.READY):
                    task.end_graph()
                else:
                    running.append(task)
                if not task.is_over:
                    self._end(task, TaskStatus.CANCELLED)
        for task in running:
            if not self.transfer_engine.cancel(task.plan.graph.graph_id):
                _log.warning("a copy of task %d does not end; its blocks are in use", task.task_id)
        self._call_back()

    def _members(self, task_ids: int | Iterable[int]) -> list[int]:
        return [
            one
            for task_id in task_id_list(task_ids)
            for one in self._batches.get(task_id, [task_id])
        ]

    # --- waiting -------------------------------------------------------------------------------

    def wait(
        self, task_ids: int | Iterable[int], timeout: float = WAIT_S, completely: bool = False
    ) -> dict[int, KVResponse]:
        """What became of tasks, for each. See `KVManager.wait`."""
        _ = self.storage
        ids = task_id_list(task_ids)
        deadline_s = time.monotonic() + wait_seconds(timeout)
        while True:
            seen = self.transfer_engine.events
            with self._lock:
                self._pump()
                answers = {task_id: self._answer(task_id, completely) for task_id in ids}
            self._call_back()
            left_s = deadline_s - time.monotonic()
            if None not in answers.values() or left_s <= 0:
                return {
                    task_id: answer or KVResponse(KVResponseStatus.TIMEOUT, task_id)
                    for task_id, answer in answers.items()
                }
            self.transfer_engine.wait_for_event(seen, left_s)

    def try_wait(
        self, task_ids: int | Iterable[int], completely: bool = False
    ) -> dict[int, KVResponse]:
        """The same without waiting; those that are on their way are left out."""
        _ = self.storage
        ids = task_id_list(task_ids)
        with self._lock:
            self._pump()
            answers = {task_id: self._answer(task_id, completely) for task_id in ids}
        self._call_back()
        return {task_id: answer for task_id, answer in answers.items() if answer is not None}

    def on_complete(self, task_id: int, callback: Callable[[KVResponse], None]) -> None:
        """Call `callback` once with the response, from whichever thread waits or asks next.

        Raises `InvalidArgumentError` for a task that is not known.
        """
        with self._lock:
            task = self._tasks.get(task_id)
            if task is None:
                raise InvalidArgumentError(f"task {task_id} is not known")
            if task.is_over:
                self._called_back.append((callback, self._response(task)))
            else:
                task.callbacks.append(callback)

    def _answer(self, task_id: int, completely: bool) -> KVResponse | None:
        """None: it is on its way. The lock is held."""
        members = self._batches.get(task_id)
        if members is not None:
            return self._batch_answer(task_id, members, completely)
        task = self._tasks.get(task_id)
        if task is None:
            return KVResponse(KVResponseStatus.NOTFOUND, task_id)
        if task.status in (TaskStatus.UNREADY, TaskStatus.READY):
            return KVResponse(KVResponseStatus.UNREADY, task_id)
        must_be_over = completely or task.task_type is KVRequestType.PREFETCH
        if not task.is_over or (must_be_over and not task.graph_is_over):
            return None
        return self._response(task)

    def _batch_answer(
        self, batch_id: int, members: Sequence[int], completely: bool
    ) -> KVResponse | None:
        """The first failure stands for all."""
        answers = [self._answer(task_id, completely) for task_id in members]
        known = [answer for answer in answers if answer is not None]
        if len(known) < len(answers):
            return None
        status = next(
            (a.status for a in known if a.status is not KVResponseStatus.SUCCESS),
            KVResponseStatus.SUCCESS,
        )
        masks = tuple(answer.return_mask for answer in known)
        return KVResponse(status, batch_id, masks[0] if masks else None, masks)

    def _response(self, task: KVTask) -> KVResponse:
        mask = task.mask(self.cache_config.tokens_per_block)
        return KVResponse(_ENDS[task.status], task.task_id, mask)

    def _pump(self) -> None:
        """Take in what is over."""
        with self._lock:
            for graph_id, op_id in self.transfer_engine.get_completed_graphs_and_ops(timeout=0):
                task = self._by_graph.get(graph_id)
                if task is None:
                    continue
                if op_id in (task.plan.graph.task_end_op_id, GRAPH_END):
                    self._note_end(task)
                if op_id == GRAPH_END:
                    del self._by_graph[graph_id]
                    task.end_graph()

    def _note_end(self, task: KVTask) -> None:
        """What the caller waits for is over. The lock is held."""
        task.plan.release_leases()
        if task.is_over:
            return
        ops = task.plan.graph.ops
        if task.task_type is KVRequestType.PREFETCH:
            reads = iter(ops.values())
            moved: list[bool] = []
            for fragment in task.plan.fragments:
                is_there = fragment.device is DeviceType.CPU
                moved += [True] * fragment.count if is_there else next(reads).moved
            task.moved = np.array(moved, np.bool_)
            is_whole = all(moved)
        else:
            end = ops[task.plan.graph.task_end_op_id]
            is_whole = end.status is TransferOpStatus.COMPLETED
            task.moved = None if is_whole else np.array(end.moved, np.bool_)
        self._end(task, TaskStatus.COMPLETED if is_whole else TaskStatus.FAILED)

    def _end(self, task: KVTask, status: TaskStatus) -> None:
        task.status = status
        self._recent.append(self._record(task))
        if status is TaskStatus.CANCELLED:
            task.moved = np.zeros(0, np.bool_)
        response = self._response(task)
        self._called_back += [(callback, response) for callback in task.callbacks]
        task.callbacks.clear()

    def _call_back(self) -> None:
        """Without the lock."""
        while self._called_back:
            try:
                callback, response = self._called_back.popleft()
            except IndexError:  # another thread has taken it
                return
            try:
                callback(response)
            except Exception:
                _log.exception("a callback of task %d failed; the task stands", response.task_id)

    # --- looking -------------------------------------------------------------------------------

    @property
    def open_tasks(self) -> int:
        """How many hold anything, or are on their way."""
        with self._lock:
            return sum(not task.graph_is_over for task in self._tasks.values())

    def _record(self, task: KVTask) -> TaskRecord:
        return TaskRecord(
            task.task_id,
            task.task_type.value,
            task.status.value,
            task.plan.tokens,
            self._clock() - task.created_s,
        )

    def open_records(self) -> list[TaskRecord]:
        """Those tasks, for `common.debug.describe`."""
        with self._lock:
            return [self._record(task) for task in self._tasks.values() if not task.graph_is_over]

    def recent_records(self) -> list[TaskRecord]:
        """The last tasks that are over, the oldest first."""
        return self._recent.snapshot()

    def tier_stores(self) -> dict[DeviceType, Store]:
        """Nearest first. They belong to this: not to be closed."""
        return dict(self.storage.stores)

    @property
    def stuck_devices(self) -> list[DeviceType]:
        """Tiers that do not answer."""
        stuck = self.transfer_engine.stuck_tiers
        return [device for device, tier in self.storage.tiers.items() if tier in stuck]

    def status_of(self, task_id: int) -> TaskStatus | None:
        """Where a task is; None: it is not known."""
        with self._lock:
            self._pump()
            task = self._tasks.get(task_id)
            return None if task is None else task.status

    def check_integrity(self) -> None:
        """Every part's own check. Raises `IntegrityError`. Blocks."""
        self._pump()
        self.transfer_engine.check_integrity()
        self.cache_engine.check_integrity()


def refuse_sliding(*, swa_aware: bool = False, swa_slot_mappings: Any = None) -> None:
    """Raise `UnsupportedError` for what is of sliding-window layers."""
    if swa_aware or swa_slot_mappings is not None:
        raise UnsupportedError(
            "swa_aware and swa_slot_mappings: sliding-window layers with blocks of their own are"
            " not served; register the tensors of full layers, or use kvelastic's own vLLM plugin"
        )


def refuse_layerwise(layerwise_transfer: bool) -> None:
    """Raise `UnsupportedError` where blocks are to be moved layer by layer."""
    if layerwise_transfer:
        raise UnsupportedError(
            "layerwise_transfer=True: blocks are moved in all layers at once; leave it off"
        )


__all__ = ["DeviceType", "KVTask", "KVTaskEngine", "TaskStatus"]
