"""Wrappers for the engine core process: the scheduler, and the executor that leads the workers.

State is kept in attributes of vLLM's objects. The executor has its `Instance`
(`kvelastic_instance`), the ranks that take part in it (`kvelastic_ranks`) and, with tiers, the
weight files as they were before loading (`kvelastic_weights`). The scheduler's block pool is an
`ElasticBlockPool`. A step's output carries the step's number (`kvelastic_step`).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from kvelastic.integration.vllm import in_gpu_worker, in_worker
from kvelastic.integration.vllm.tier_connector import is_ours
from kvelastic.pool.scheduling.memory_wait import Backoff
from kvelastic.pool.scheduling.over_limit import Holder, OverLimit
from kvelastic.pool.scheduling.waiting import ShortRequest, WaitingRequests

if TYPE_CHECKING:
    from kvelastic.integration.vllm.scheduler_side import Instance

_log = logging.getLogger("kvelastic.vllm")

_KV_CACHE = "kv_cache"
"""vLLM's sleep and wake tag for KV cache memory."""

_T = TypeVar("_T")

_waiting_instance: Instance | None = None
"""Created before the workers start; the next block pool of this process takes it."""


# --- the executor: an instance's life ---------------------------------------------------------


def executor_init(
    original: Callable[..., Any], executor: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Refuse unsupported settings before a worker starts or a model loads.

    With tiers it also records the state of the weight files. If a file changes later, its contents
    are treated as unknown.
    """
    from kvelastic import config
    from kvelastic.integration.vllm.start_checks import check_start

    check_start(vllm_config, [int(vllm_config.parallel_config.data_parallel_index)])
    if config.load().tiers:
        from kvelastic.integration.vllm.tier_namespace import weight_files_of

        executor.kvelastic_weights = weight_files_of(vllm_config)
    original(executor, vllm_config, *args, **kwargs)


def executor_initialize(
    original: Callable[..., Any], executor: Any, kv_cache_configs: list[Any]
) -> None:
    """Create the instance; give each worker the paged layout and the segment to attach to."""
    from kvelastic.integration.vllm import scheduler_side
    from kvelastic.integration.vllm.refusals import refuse_cache_configuration
    from kvelastic.integration.vllm.tier_refusals import refuse_cache_for_tiers

    global _waiting_instance
    # A stage or a model without attention has no KV cache and takes no part.
    ranks = [rank for rank, config in enumerate(kv_cache_configs) if config.kv_cache_tensors]
    if not ranks:
        original(executor, kv_cache_configs)
        return
    vllm_config = executor.vllm_config
    has_tiers = is_ours(vllm_config.kv_transfer_config)
    with_cache = [kv_cache_configs[rank] for rank in ranks]
    for config in with_cache:
        refuse_cache_configuration(vllm_config, config)
        if has_tiers:
            refuse_cache_for_tiers(config)
    facts = of_each_worker(executor, in_worker.device_facts)
    instance = scheduler_side.start_instance(
        vllm_config, with_cache, [facts[rank] for rank in ranks]
    )
    try:
        for rank, config in enumerate(with_cache):
            instance.rewrite(config, rank)
        original(executor, kv_cache_configs)
        instance.wait_for_workers()
        instance.open_tiers(
            vllm_config, with_cache[0], getattr(executor, "kvelastic_weights", None)
        )
    except BaseException:
        instance.close()
        raise
    executor.kvelastic_instance = instance
    executor.kvelastic_ranks = ranks
    # If the worker shares this process, the scheduler would otherwise read the id span here.
    vllm_config.cache_config.num_gpu_blocks = instance.num_blocks
    _waiting_instance = instance


def executor_warm_up(original: Callable[..., Any], executor: Any) -> None:
    """Start the maintenance thread after vLLM's warm-up.

    From then on the instance maps pages ahead, handles requests and gives memory to others. Not
    earlier: a driver call during CUDA graph capture can abort the capture.
    """
    from kvelastic.integration.vllm import end_with_starter

    instance = _instance_of(executor)
    original(executor)
    end_with_starter.note_start()
    if instance is None:
        return
    try:
        held_bytes = of_each_worker(executor, in_gpu_worker.hand_over_reserve)
        instance.begin([held_bytes[rank] for rank in executor.kvelastic_ranks])
    except BaseException:
        instance.close()
        raise


def engine_core_shutdown(original: Callable[..., Any], core: Any) -> None:
    """Demote cached blocks while the workers can still copy them; then close the instance.

    After a fault, the engine ends without demoting, because its workers may hang. It then waits
    for them and kills them. SIGTERM is ignored here: it would interrupt that and leave the workers
    behind.
    """
    global _waiting_instance
    executor = core.model_executor
    instance = _instance_of(executor)
    was_told_to_end = not isinstance(sys.exc_info()[1], Exception)
    with _deaf_to_sigterm():
        try:
            if was_told_to_end and instance is not None and instance.tiers is not None:
                instance.tiers.before_exit()
            original(core)
        finally:
            _waiting_instance = None
            if instance is not None:
                instance.close()


@contextlib.contextmanager
def _deaf_to_sigterm() -> Iterator[None]:
    """Only in the engine core's own process; elsewhere signal handling belongs to the user."""
    is_own = multiprocessing.parent_process() is not None
    if not is_own or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def of_each_worker(executor: Any, function: Callable[[Any], _T]) -> list[_T]:
    """Call a function of a module in each worker; return the results by rank."""
    results: list[_T] = executor.collective_rpc(partial(_on_worker, function))
    return results


def _on_worker(function: Callable[[Any], _T], wrapper: Any) -> _T:
    """Run in a worker. `wrapper` is vLLM's `WorkerWrapperBase`."""
    return function(wrapper.worker)


def _instance_of(executor: Any) -> Instance | None:
    return getattr(executor, "kvelastic_instance", None)


# --- the executor: sleep and wake -------------------------------------------------------------


def executor_sleep(original: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> None:
    """Release the whole KV cache after the workers have offloaded what vLLM itself manages.

    If the workers now hold less than at their start, the next wake reserves that smaller amount.
    """
    instance = _instance_of(executor)
    if instance is not None and instance.is_on_gpu and not executor.is_sleeping:
        held_bytes = of_each_worker(executor, in_gpu_worker.hand_over_reserve)
        instance.lower_reserve([held_bytes[rank] for rank in executor.kvelastic_ranks])
    original(executor, *args, **kwargs)
    if instance is not None:
        instance.sleep()
        instance.say_whether_engine_sleeps(executor.is_sleeping)
        if not instance.is_on_gpu:
            _log.info("Asleep: no KV cache is held; weights stay in memory on the CPU.")


def executor_wake_up(
    original: Callable[..., Any], executor: Any, tags: list[str] | None = None
) -> None:
    """Allow block allocation again; pages are mapped when requests need them.

    On a GPU this also runs when only the weights wake: their reserve is requested first.
    """
    instance = _instance_of(executor)
    if instance is not None and (
        tags is None or _KV_CACHE in tags or (instance.is_on_gpu and executor.is_sleeping)
    ):
        instance.wake()
    original(executor, tags)
    if instance is not None:
        instance.say_whether_engine_sleeps(executor.is_sleeping)


def executor_discard(original: Callable[..., Any], executor: Any, tags: tuple[str, ...]) -> None:
    """Release the KV cache alone (`release_kv_cache_memory`); workers keep none of it."""
    instance = _instance_of(executor)
    others = tuple(tag for tag in tags if tag != _KV_CACHE)
    if instance is None or len(others) == len(tags):
        original(executor, tags)
        return
    if others:
        original(executor, others)
    instance.sleep()
    executor.sleeping_tags |= {_KV_CACHE}
    instance.say_whether_engine_sleeps(executor.is_sleeping)


# --- the scheduler ----------------------------------------------------------------------------


def make_block_pool(block_pool: Any, num_gpu_blocks: int, *args: Any, **kwargs: Any) -> Any:
    """Replace `BlockPool(...)` in the scheduler: return the elastic pool, once per instance."""
    from kvelastic.integration.vllm.block_pool import ElasticBlockPool

    global _waiting_instance
    instance, _waiting_instance = _waiting_instance, None
    if instance is None:
        return block_pool(num_gpu_blocks, *args, **kwargs)
    pool = ElasticBlockPool(
        num_gpu_blocks,
        *args,
        memory=instance.blocks,
        id_span=instance.id_span,
        instance_name=instance.name,
        **kwargs,
    )
    if instance.tiers is not None:
        instance.tiers.bind(pool)
    return pool


def make_blocks_needed(original: Callable[..., int]) -> Callable[..., int]:
    """Map memory before vLLM checks for free blocks; vLLM asks for every request in every step.

    Records the first request of a step that lacks memory, for operators.
    """

    def get_num_blocks_to_allocate(
        self: Any,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        needed = original(
            self,
            request_id,
            num_tokens,
            new_computed_blocks,
            num_encoder_tokens,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )
        if needed > 0:
            memory = getattr(self.block_pool, "memory", None)
            if memory is not None:
                is_short = memory.prepare(needed) < needed
                if is_short and self.block_pool.short is None:
                    none_computed: tuple[Any, ...] = ((),) * len(new_computed_blocks)

                    def count_blocks(tokens: int) -> int:
                        return original(
                            self,
                            request_id,
                            tokens,
                            none_computed,
                            num_encoder_tokens,
                            0,
                            0,
                            tokens,
                            True,
                            prefill_end,
                        )

                    self.block_pool.short = ShortRequest(request_id, count_blocks)
        return needed

    return get_num_blocks_to_allocate


def schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Run vLLM's scheduling in one pool session; the resulting step is in flight afterwards."""
    pool = _elastic_pool(scheduler)
    if pool is None:
        return original(scheduler, *args, **kwargs)
    memory = pool.memory
    memory.headroom = scheduler.kv_cache_manager.watermark_blocks
    if pool.backoff is None:
        from kvelastic import config

        pool.backoff = Backoff(memory, partial(_requests_of, scheduler))
        pool.over_limit = OverLimit(memory, config.load().limit_wait_s)
        pool.waiting = WaitingRequests(memory, pool.instance_name)
    pool.backoff.look()
    pool.short = None
    memory.report_busy(scheduler.has_unfinished_requests())
    with pool.session():
        if pool.tiers is not None:
            pool.tiers.deliver(scheduler)
        with _preempted_over_limit(pool, scheduler):
            output = original(scheduler, *args, **kwargs)
        works = output.total_num_scheduled_tokens > 0
        if pool.tiers is not None and memory.fell_short and not works and not memory.is_at_work:
            pool.tiers.give_back_loaded(scheduler)
        _report_waiting(pool, scheduler)
    output.kvelastic_step = memory.step_begins(works=works)
    pool.backoff.has_looked(works=works)
    if pool.tiers is not None:
        pool.tiers.step_is_made(
            partial(_requests_of, scheduler), output, is_idle=not memory.is_at_work
        )
    return output


@contextlib.contextmanager
def _preempted_over_limit(pool: Any, scheduler: Any) -> Iterator[None]:
    """Preempt requests that have kept the pool over its limit for too long.

    While their pages drain, no request is admitted: a preempted one could find its own blocks in
    the cache and take them again.
    """
    running = list(scheduler.running)
    choice = pool.over_limit.choose(lambda: [_holder(scheduler, one) for one in running])
    if choice.requests:
        _log.info("Running requests preempted for the limit: %d.", len(choice.requests))
    # vLLM puts each in front of the waiting requests, so preempt the newest first.
    for index in sorted(choice.requests, reverse=True):
        scheduler.running.remove(running[index])
        scheduler._preempt_request(
            running[index], time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery
        )
    before = scheduler.pause_state
    if not choice.is_enough or before != type(before).UNPAUSED:
        yield
        return
    scheduler._pause_state = type(before).PAUSED_NEW
    try:
        yield
    finally:
        scheduler._pause_state = before


def _holder(scheduler: Any, request: Any) -> Holder:
    """No blocks if vLLM would free them only after a connector has finished with them."""
    blocks: Iterable[int] = ()
    if scheduler._request_blocks_can_be_freed(request):
        by_group = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        blocks = chain.from_iterable(by_group)
    return Holder(request.num_computed_tokens, frozenset(blocks))


def _report_waiting(pool: Any, scheduler: Any) -> None:
    """Report how many requests wait for memory after this step, and what the first one needs.

    Its need is known only if it has no blocks: it was not admitted, or it was preempted.
    """
    _, requests = scheduler.get_request_counts()
    if not pool.memory.fell_short or not requests:
        pool.waiting.report(0)
        return
    short = pool.short
    request = None if short is None else scheduler.requests.get(short.request_id)
    if request is None or _has_blocks(scheduler, request):
        pool.waiting.report(requests)
        return
    # The last token of a response is never computed, so it needs no slot.
    longest = min(request.num_prompt_tokens + request.max_tokens - 1, scheduler.max_model_len)
    pool.waiting.report(
        requests,
        first_blocks=short.count_blocks(request.num_tokens),
        first_may_blocks=short.count_blocks(max(request.num_tokens, longest)),
    )


def _has_blocks(scheduler: Any, request: Any) -> bool:
    return any(scheduler.kv_cache_manager.get_block_ids(request.request_id))


def _requests_of(scheduler: Any) -> tuple[object, ...]:
    """A value that changes when a request arrives, leaves or becomes runnable."""
    return (len(scheduler.requests), len(scheduler.finished_req_ids), scheduler.pause_state)


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """The workers have executed this step: release the blocks pinned for it."""
    pool = _elastic_pool(scheduler)
    if pool is None:
        return original(scheduler, scheduler_output, *args, **kwargs)
    pool.memory.step_ends(scheduler_output.kvelastic_step)
    if pool.tiers is not None:
        pool.tiers.step_has_run(scheduler_output)
    # A connector looks up cached blocks here; they must not move during that.
    with contextlib.nullcontext() if scheduler.connector is None else pool.session():
        outputs = original(scheduler, scheduler_output, *args, **kwargs)
    pool.memory.report_busy(scheduler.has_unfinished_requests())
    return outputs


def step(original: Callable[..., Any], core: Any) -> Any:
    """While all requests wait for memory, back off instead of running an empty step."""
    return ({}, False) if _backs_off(core) else original(core)


def step_with_batch_queue(original: Callable[..., Any], core: Any) -> Any:
    """Like `step`. The queue then holds only empty steps, which end with later ones."""
    return (None, False) if _backs_off(core) else original(core)


def _backs_off(core: Any) -> bool:
    """Return True if all requests wait for memory, still after a backoff.

    False if only a step can free blocks: with a connector that completes transfers in steps
    (tiers do not), and while blocks are pinned for a step.
    """
    pool = _elastic_pool(core.scheduler)
    if pool is None:
        return False
    if pool.tiers is not None and pool.tiers.waits:
        return bool(pool.tiers.pause())
    if pool.backoff is None or pool.backoff.memory_wait is None:
        return False
    moves_in_steps = core.scheduler.connector is not None and pool.tiers is None
    if pool.memory.waits_for_steps and not moves_in_steps:
        return False
    still: bool = pool.backoff.memory_wait.pause()
    return still and not moves_in_steps


def _elastic_pool(scheduler: Any) -> Any | None:
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    return pool if hasattr(pool, "memory") else None
