"""Wrappers for the engine core's process: the scheduler, and the executor that leads the workers.

What is kept where: an executor has its `Instance` (`kvelastic_instance`), which of its workers have
a part in it (`kvelastic_ranks`), and, with tiers, the files of its weights as they were before they
were loaded (`kvelastic_weights`), a scheduler's block pool is an `ElasticBlockPool`, a step's
output carries the step's number (`kvelastic_step`).
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
from typing import TYPE_CHECKING, Any

from kvelastic.integration.vllm.tier_connector import is_ours
from kvelastic.scheduling.over_limit import Holder, OverLimit
from kvelastic.scheduling.starvation import Naps
from kvelastic.scheduling.waiting import ShortRequest, WaitingRequests

if TYPE_CHECKING:
    from kvelastic.integration.vllm.scheduler_side import Instance

_log = logging.getLogger("kvelastic.vllm")

_KV_CACHE = "kv_cache"
"""vLLM's tag of the KV cache's memory, for sleep and wake."""

DEVICE_FACTS = "kvelastic_device_facts"
"""Method of a worker that tells its device; set by our hooks, called by name."""
HAND_OVER = "kvelastic_hand_over_reserve"
"""Method of a worker that ends its own reserve and tells what it holds besides the KV cache."""

_waiting_instance: Instance | None = None
"""Made before the workers start; the next block pool of this process takes it."""


# --- the executor: an instance's life ---------------------------------------------------------


def executor_init(
    original: Callable[..., Any], executor: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Refuse what is not covered, before a worker is started or a model is loaded.

    With tiers, the weights' files are looked at now: a change from here on makes them unknown.
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
    """Make the instance; give each worker the paged layout and where to attach."""
    from kvelastic.integration.vllm import scheduler_side
    from kvelastic.integration.vllm.refusals import refuse_cache_configuration
    from kvelastic.integration.vllm.tier_refusals import refuse_cache_for_tiers

    global _waiting_instance
    # A stage without attention, or a model without it, has no KV cache and no part in this.
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
    facts = executor.collective_rpc(DEVICE_FACTS)
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
    # In one process with its worker, the scheduler would read the span of ids here.
    vllm_config.cache_config.num_gpu_blocks = instance.num_blocks
    _waiting_instance = instance


def executor_warm_up(original: Callable[..., Any], executor: Any) -> None:
    """From here on the instance maps pages ahead, answers requests, and gives to others.

    Not before: a driver's call in the middle of a graph's capture can end it.
    """
    from kvelastic.integration.vllm import with_starter

    instance = _instance_of(executor)
    original(executor)
    with_starter.note_start()
    if instance is None:
        return
    try:
        held_bytes = executor.collective_rpc(HAND_OVER)
        instance.begin([held_bytes[rank] for rank in executor.kvelastic_ranks])
    except BaseException:
        instance.close()
        raise


def engine_core_shutdown(original: Callable[..., Any], core: Any) -> None:
    """Demote what is cached, as long as there are workers to copy it; then close the instance.

    An engine that ends by a fault ends at once: its workers may not answer any more. It kills them
    then, after some waiting; told to end meanwhile it would leave them behind.
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
    """In a process of the engine core's own: elsewhere signals are the user's."""
    is_own = multiprocessing.parent_process() is not None
    if not is_own or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _instance_of(executor: Any) -> Instance | None:
    return getattr(executor, "kvelastic_instance", None)


# --- the executor: sleep and wake -------------------------------------------------------------


def executor_sleep(original: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> None:
    """Give the whole KV cache back, after the workers have put aside what vLLM itself manages.

    What a wake asks for is what the workers hold now, if that is less than they were seen to hold
    at their start.
    """
    instance = _instance_of(executor)
    if instance is not None and instance.is_on_gpu and not executor.is_sleeping:
        held_bytes = executor.collective_rpc(HAND_OVER)
        instance.lower_reserve([held_bytes[rank] for rank in executor.kvelastic_ranks])
    original(executor, *args, **kwargs)
    if instance is not None:
        instance.sleep()
        instance.say_whether_engine_sleeps(executor.is_sleeping)


def executor_wake_up(
    original: Callable[..., Any], executor: Any, tags: list[str] | None = None
) -> None:
    """Let blocks be handed out again; their memory comes with the requests that need it.

    On a GPU also where the weights alone wake: what is reserved for them is asked for first.
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
    """Give the KV cache back alone (`release_kv_cache_memory`); workers keep nothing of it."""
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
    """What `BlockPool(...)` means in the scheduler: the elastic one, once for each instance."""
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
    """Have memory mapped before vLLM checks what is free; asked for every request of every step.

    The first request of a step that there is too little for is noted, for operators.
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
    """One session of the pool; the step that comes of it is on its way from here."""
    pool = _elastic_pool(scheduler)
    if pool is None:
        return original(scheduler, *args, **kwargs)
    memory = pool.memory
    memory.headroom = scheduler.kv_cache_manager.watermark_blocks
    if pool.naps is None:
        from kvelastic import config

        pool.naps = Naps(memory, partial(requests_of, scheduler))
        pool.over_limit = OverLimit(memory, config.load().limit_wait_s)
        pool.waiting = WaitingRequests(memory, pool.instance_name)
    pool.naps.look()
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
    pool.naps.has_looked(works=works)
    if pool.tiers is not None:
        pool.tiers.step_is_made(scheduler, output, is_idle=not memory.is_at_work)
    return output


@contextlib.contextmanager
def _preempted_over_limit(pool: Any, scheduler: Any) -> Iterator[None]:
    """Preempt requests that have kept the pool over its limit for too long.

    While their pages empty no request is admitted: it could find what it had there in the cache.
    """
    running = list(scheduler.running)
    choice = pool.over_limit.choose(lambda: [_holder(scheduler, one) for one in running])
    if choice.requests:
        _log.info("%d requests make way for the limit.", len(choice.requests))
    # Each is put before those that wait: the one that came last goes first.
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
    """Its blocks are none where they would only be given back when a connector is done."""
    blocks: Iterable[int] = ()
    if scheduler._request_blocks_can_be_freed(request):
        by_group = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        blocks = chain.from_iterable(by_group)
    return Holder(request.num_computed_tokens, frozenset(blocks))


def _report_waiting(pool: Any, scheduler: Any) -> None:
    """Report how many requests wait for memory after this step, and what the first of them needs.

    What it needs is known where it has no block: it was not admitted, or it was preempted.
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
    # The last token of an answer is never computed, so it needs no place.
    longest = min(request.num_prompt_tokens + request.max_tokens - 1, scheduler.max_model_len)
    pool.waiting.report(
        requests,
        first_blocks=short.count_blocks(request.num_tokens),
        first_may_blocks=short.count_blocks(max(request.num_tokens, longest)),
    )


def _has_blocks(scheduler: Any, request: Any) -> bool:
    return any(scheduler.kv_cache_manager.get_block_ids(request.request_id))


def requests_of(scheduler: Any) -> tuple[object, ...]:
    """What changes whenever a request comes or goes, or may go on."""
    return (len(scheduler.requests), len(scheduler.finished_req_ids), scheduler.pause_state)


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """The workers have carried this step out: what was pinned for it is free now."""
    pool = _elastic_pool(scheduler)
    if pool is None:
        return original(scheduler, scheduler_output, *args, **kwargs)
    pool.memory.step_ends(scheduler_output.kvelastic_step)
    if pool.tiers is not None:
        pool.tiers.step_has_run(scheduler_output)
    # A connector looks up cached blocks here, which must not move meanwhile.
    with contextlib.nullcontext() if scheduler.connector is None else pool.session():
        outputs = original(scheduler, scheduler_output, *args, **kwargs)
    pool.memory.report_busy(scheduler.has_unfinished_requests())
    return outputs


def step(original: Callable[..., Any], core: Any) -> Any:
    """Take a nap in the place of an empty step while all wait for memory."""
    return ({}, False) if _naps(core) else original(core)


def step_with_batch_queue(original: Callable[..., Any], core: Any) -> Any:
    """As `step`; what is in the queue then are empty steps, which end with those to come."""
    return (None, False) if _naps(core) else original(core)


def _naps(core: Any) -> bool:
    """Whether all requests wait for memory, and still do after a nap.

    False where blocks come free only in a step: with a connector whose transfers end there (those
    of tiers do not), and while some are pinned for a step.
    """
    pool = _elastic_pool(core.scheduler)
    if pool is None:
        return False
    if pool.tiers is not None and pool.tiers.waits:
        return bool(pool.tiers.nap())
    if pool.naps is None or pool.naps.starvation is None:
        return False
    moves_in_steps = core.scheduler.connector is not None and pool.tiers is None
    if pool.memory.waits_for_steps and not moves_in_steps:
        return False
    still: bool = pool.naps.starvation.nap()
    return still and not moves_in_steps


def _elastic_pool(scheduler: Any) -> Any | None:
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    return pool if hasattr(pool, "memory") else None
