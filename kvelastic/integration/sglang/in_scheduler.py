"""Wrappers for SGLang's scheduler, which runs the model in the same process and thread."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Final

from kvelastic.errors import KvelasticError
from kvelastic.integration.sglang import retraction
from kvelastic.integration.sglang.hidden_requests import hidden_requests
from kvelastic.integration.sglang.late_releases import LateReleases
from kvelastic.integration.sglang.refusals import ends_process, refuse_cache
from kvelastic.pool.pool import RESERVE_WAIT_S
from kvelastic.pool.scheduling.memory_wait import PAUSE_S
from kvelastic.pool.scheduling.over_limit import OverLimit
from kvelastic.pool.scheduling.waiting import WaitingRequests

if TYPE_CHECKING:
    from kvelastic.integration.sglang.allocator import ElasticPagedAllocator
    from kvelastic.integration.sglang.radix_cache import ElasticRadixCache
    from kvelastic.pool.engine_pool import EnginePool
    from kvelastic.tiers.weights_fingerprint import WeightFiles

_log = logging.getLogger("kvelastic.sglang")

KV_CACHE_TAG: Final = "kv_cache"
"""SGLang's tag of the KV cache's memory."""
NO_ROOM_FOR_THE_LAST: Final = "Out of memory even after retracting all other requests"
"""Start of SGLang's message for the last request, which it aborts."""


# --- the scheduler begins ----------------------------------------------------------------------


def kv_pool_class(original: Callable[..., Any], platform: Any, *, kind: str) -> Any:
    """Return the elastic pool for the supported kind of attention."""
    if kind != "mha":
        return original(platform, kind=kind)
    from kvelastic.integration.sglang.kv_pool import ElasticMHATokenToKVPool

    return ElasticMHATokenToKVPool


def paged_allocator_class(original: Callable[..., Any], platform: Any) -> Any:
    """Return the allocator that takes its pages from the elastic pool."""
    from kvelastic.integration.sglang.allocator import ElasticPagedAllocator

    return ElasticPagedAllocator


def radix_cache(original: Callable[..., Any], context: Any, **more: Any) -> Any:
    """Create a tree from which the pool may evict blocks that no request uses."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    from kvelastic.integration.sglang.allocator import ElasticPagedAllocator

    if type(context.params.token_to_kv_pool_allocator) is not ElasticPagedAllocator:
        return original(context, **more)  # refused soon after, with the reason
    from kvelastic.integration.sglang.radix_cache import ElasticFullComponent, ElasticRadixCache

    context.params.component_registry_override = {
        **(context.params.component_registry_override or {}),
        ComponentType.FULL: ElasticFullComponent,
    }
    return original(context, **{**more, "cache_class": ElasticRadixCache})


def scheduler_init(original: Callable[..., None], scheduler: Any, *args: Any, **more: Any) -> None:
    """Refuse other KV caches; start handling operators' requests."""
    weights = _weight_files(*args, **more)
    original(scheduler, *args, **more)
    _begin(scheduler, weights)


@ends_process
def _weight_files(server_args: Any, *args: Any, **more: Any) -> WeightFiles | None:
    """With tiers, return the weight files before they load: later changes make them unknown."""
    from kvelastic import config

    if not config.load().tiers:
        return None
    from kvelastic.tiers.weights_fingerprint import WeightFiles

    return WeightFiles.look(str(server_args.model_path), server_args.load_format)


@ends_process
def _begin(scheduler: Any, weights: WeightFiles | None) -> None:
    from kvelastic import config
    from kvelastic.device.process_memory import anonymous_bytes
    from kvelastic.integration.sglang.allocator import ElasticPagedAllocator
    from kvelastic.integration.sglang.kv_pool import ElasticMHATokenToKVPool
    from kvelastic.integration.sglang.radix_cache import ElasticRadixCache

    refuse_cache(scheduler, ElasticMHATokenToKVPool, ElasticPagedAllocator, ElasticRadixCache)
    settings = config.load()
    elastic = _elastic(scheduler)
    _radix_cache(scheduler).checks_integrity = settings.sanity_check
    _allocator(scheduler).late_releases = LateReleases()
    _allocator(scheduler).over_limit = OverLimit(elastic.blocks, settings.limit_wait_s)
    _allocator(scheduler).waiting = WaitingRequests(elastic.blocks, elastic.pool.name)
    # `atexit` does not run in multiprocessing children.
    Finalize(elastic, elastic.close, exitpriority=10)
    if settings.tiers:
        from kvelastic.integration.sglang.tier_opening import open_for

        loads = open_for(settings, elastic, scheduler, weights)
        if loads is not None:
            Finalize(loads, loads.close, exitpriority=20)
    elastic.begin(settings, anonymous_bytes(os.getpid()))
    elastic.pool.segment.control_block.set_engine_asleep(False)


# --- each round --------------------------------------------------------------------------------


def ingest_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **more: Any) -> Any:
    """Once per round, busy, idle or paused: return unlocked blocks to the pool."""
    requests = original(scheduler, *args, **more)
    if _allocator(scheduler).wakes_later:
        _wake(scheduler, PAUSE_S)
    updater = scheduler.weight_updater
    _allocator(scheduler).late_releases.carry_out(scheduler, lambda: _may_release(updater))
    _radix_cache(scheduler).settle()
    return requests


def get_next_batch(
    original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any
) -> Any:
    """Schedule in a session of the pool, so that what SGLang sees as free stays free.

    Hides requests from SGLang whose prefixes are being loaded from tiers, or which arrived after a
    pending release. If requests only wait, for memory or a load, the
    loop backs off instead of spinning.
    """
    allocator, cache = _allocator(scheduler), _radix_cache(scheduler)
    blocks = allocator.blocks
    seen, given_back = blocks.availability_epoch, blocks.given_back  # before it looks
    loads = cache.prefix_loads
    behind = allocator.late_releases.behind(scheduler)
    allocator.prefill_budget = None
    with blocks.session():
        choice = retraction.choose(allocator, scheduler, running_batch, last_batch)
        with (
            # While pages drain, admit no request: one could find its old blocks in the tree.
            hidden_requests(
                scheduler, list(scheduler.waiting_queue) if choice.is_enough else behind
            ),
            nullcontext() if loads is None else loads.hidden_requests(scheduler),
        ):
            plan = original(scheduler, running_batch=running_batch, last_batch=last_batch)
        is_idle = plan.batch_to_run is None and last_batch is None
        budget = allocator.prefill_budget
        if is_idle and budget is not None and budget.chunk_waits:
            _retract_chunked(scheduler, plan.running_batch)
        cache.tree_blocks.settle()
    _report_waiting(allocator, scheduler)
    blocks.report_busy(plan.batch_to_run is not None or _has_requests(scheduler, plan))
    gave_back = blocks.given_back != given_back  # a waiting request may fit now
    if (is_idle and _waits(scheduler) and not gave_back) and (
        loads is None or not loads.wait_for_any(PAUSE_S)
    ):
        blocks.wait_for_epoch(seen, PAUSE_S)
    return plan


def run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **more: Any
) -> Any:
    """Measure the time to compute a block: slower tiers are not used."""
    loads = _radix_cache(scheduler).prefix_loads
    if loads is None or not batch.forward_mode.is_extend():
        return original(scheduler, batch, *args, **more)
    began_s = time.monotonic()
    result = original(scheduler, batch, *args, **more)
    loads.computed(int(batch.extend_num_tokens), time.monotonic() - began_s)
    return result


def _has_requests(scheduler: Any, plan: Any) -> bool:
    """Return True if a request runs or waits although no batch runs, for a grammar too."""
    return (
        not plan.running_batch.is_empty()
        or _waits(scheduler)
        or bool(scheduler.grammar_manager.grammar_queue)
    )


def _report_waiting(allocator: ElasticPagedAllocator, scheduler: Any) -> None:
    """Report how many requests wait for memory after this round, and what the first one needs.

    Rounds in which SGLang looks for no prefill change nothing.
    """
    budget = allocator.prefill_budget
    if not _waits(scheduler):
        allocator.waiting.report(0)
    elif budget is not None:
        lacks = budget.short_blocks is not None or budget.chunk_waits or not budget.has_capacity()
        count = len(scheduler.waiting_queue) + (scheduler.chunked_req is not None)
        allocator.waiting.report(count if lacks else 0, first_blocks=budget.short_blocks or 0)


def _waits(scheduler: Any) -> bool:
    return bool(scheduler.waiting_queue) or scheduler.chunked_req is not None


def _retract_chunked(scheduler: Any, running_batch: Any) -> None:
    """Retract a partly computed prompt that cannot continue although no other request runs.

    If it kept its memory, a limit below that would never be met, and two instances with half a
    prompt each would wait for each other. Its computed part stays in the tree. SGLang does the same
    in a pause.
    """
    from sglang.srt.managers.schedule_batch import retract_all

    request, scheduler.chunked_req = scheduler.chunked_req, None
    _log.warning(
        "There is no memory for the rest of prompt %s: %d of its %d tokens are computed. It waits "
        "without its memory.",
        request.rid,
        request.prefix_len,
        len(request.full_untruncated_fill_ids),
    )
    retract_all(
        reqs=[request],
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=_allocator(scheduler),
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
        offload_kv=False,
    )
    running_batch.batch_is_full = False
    scheduler._add_request_to_queue(request, is_retracted=True)


def retract_decode(original: Callable[..., Any], batch: Any) -> Any:
    """Retract requests chosen for the limit, and more only if the rest has too little memory.

    The last request waits for memory too; stock SGLang fails it with status 500.
    """
    allocator: ElasticPagedAllocator = batch.token_to_kv_pool_allocator
    gone = retraction.retract(batch, allocator.to_retract)
    allocator.to_retract = ()
    if gone:
        _log.info("Retracted %d requests to meet the limit.", len(gone))
        if batch.is_empty() or batch.check_decode_mem():
            return gone, retraction.ratio_after(batch), []
    retracted, ratio, aborted = original(batch)
    retracted[:0] = gone
    kept = []
    for request in aborted:
        reason = getattr(request.to_finish, "message", "")
        if request.beam_group is None and reason.startswith(NO_ROOM_FOR_THE_LAST):
            request.to_finish = None
            retracted.append(request)
        else:
            kept.append(request)
    return retracted, ratio, kept


def reports_no_room_for_the_last(retract: Any) -> bool:
    """Return True if SGLang's own `retract_decode` still has that message."""
    code = getattr(retract, "__code__", None)
    texts = code.co_consts if code is not None else ()
    return any(isinstance(text, str) and text.startswith(NO_ROOM_FOR_THE_LAST) for text in texts)


# --- what SGLang counts ------------------------------------------------------------------------


def token_info(original: Callable[..., Any], observer: Any) -> Any:
    """Report usage relative to the current limit."""
    stats = original(observer)
    held = observer.token_to_kv_pool_allocator.used_size()
    used = held - stats.full_evictable_size
    reachable = held + stats.full_available_size
    return dataclasses.replace(
        stats,
        full_num_used=used,
        full_token_usage=used / reachable if reachable else 0.0,
        full_capacity=reachable,
    )


def check_full_pool(
    original: Callable[..., Any], checker: Any, stats: Any, *args: Any, **more: Any
) -> Any:
    """Run SGLang's leak check against the pool: every used block there must be accounted for here.

    Memory that a limit withholds, that other instances hold, or that tiers load into counts as
    available.
    """
    if checker.tree_cache.checks_integrity:
        checker.tree_cache.tree_blocks.check_integrity()
        checker.tree_cache.blocks.check_integrity()
    held = checker.token_to_kv_pool_allocator.used_size()
    if checker.tree_cache.prefix_loads is not None:
        held -= checker.tree_cache.prefix_loads.loading_tokens
    whole = dataclasses.replace(stats, full_available_size=checker.max_total_num_tokens - held)
    return original(checker, whole, *args, **more)


# --- sleep -------------------------------------------------------------------------------------


def release_memory(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Release the KV cache's memory after SGLang has emptied it.

    With tiers, blocks are demoted first and can be loaded again later. While a request runs, the
    caller waits, and later requests wait behind the release; stock SGLang ends its scheduler.
    """

    def release() -> Any:
        is_asked = KV_CACHE_TAG in (request.tags or [KV_CACHE_TAG])
        loads = _radix_cache(updater.scheduler).prefix_loads if is_asked else None
        with nullcontext() if loads is None else loads.demoted():
            answer = original(updater, request)
        if is_asked:
            _allocator(updater.scheduler).wakes_later = False
            elastic = _elastic(updater.scheduler)
            elastic.pool.blocks.sleep()
            elastic.pool.segment.control_block.set_engine_asleep(True)
        return answer

    if _may_release(updater):
        return release()
    _allocator(updater.scheduler).late_releases.add(updater.scheduler, request, release)
    return None  # SGLang sends no reply


def _may_release(updater: Any) -> bool:
    """Return the condition that SGLang asserts for a release."""
    return bool(updater.is_fully_idle(ignore_waiting=updater.scheduler._engine_paused))


def resume_memory(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Allow allocation again. Memory that is awake stays so; stock SGLang ends its scheduler.

    SGLang has no reply for a failure. If other instances have not given the reserved memory,
    requests wait, and each round tries again.
    """
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    from sglang.srt.managers.io_struct import (
        ReleaseMemoryOccupationReqOutput,
        ResumeMemoryOccupationReqOutput,
    )

    scheduler = updater.scheduler
    # A resume cancels pending releases.
    _allocator(scheduler).late_releases.give_up(scheduler, ReleaseMemoryOccupationReqOutput())
    tags = request.tags or GPU_MEMORY_ALL_TYPES
    request.tags = [tag for tag in tags if tag in updater.offload_tags]
    if not request.tags:
        return ResumeMemoryOccupationReqOutput()
    if KV_CACHE_TAG in request.tags:
        error = _wake(scheduler, RESERVE_WAIT_S)
        if error is not None:
            _log.error(
                "The KV cache could not wake: %s Requests wait; each round tries again.", error
            )
    return original(updater, request)


def _wake(scheduler: Any, timeout_s: float) -> KvelasticError | None:
    """Wake the pool. Returns an error if it stays asleep; a later round then tries again."""
    allocator, elastic = _allocator(scheduler), _elastic(scheduler)
    try:
        elastic.pool.blocks.wake(timeout_s)
        elastic.pool.map_null_block(timeout_s)
    except KvelasticError as error:
        elastic.pool.blocks.sleep()
        allocator.wakes_later = True
        return error
    allocator.wakes_later = False
    elastic.pool.segment.control_block.set_engine_asleep(False)
    return None


def _allocator(scheduler: Any) -> ElasticPagedAllocator:
    allocator: ElasticPagedAllocator = scheduler.token_to_kv_pool_allocator
    return allocator


def _radix_cache(scheduler: Any) -> ElasticRadixCache:
    cache: ElasticRadixCache = scheduler.tree_cache
    return cache


def _elastic(scheduler: Any) -> EnginePool:
    elastic: EnginePool = _allocator(scheduler).get_kvcache().elastic
    return elastic
