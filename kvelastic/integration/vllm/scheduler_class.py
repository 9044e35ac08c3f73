"""vLLM's scheduler over an elastic block pool: a subclass of the class in its settings."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvelastic.integration.vllm.in_engine_core import elastic_pool
from kvelastic.integration.vllm.subclasses import Subclasses
from kvelastic.pool.scheduling.memory_wait import Backoff
from kvelastic.pool.scheduling.over_limit import Holder, OverLimit
from kvelastic.pool.scheduling.waiting import WaitingRequests

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
else:
    Scheduler = object

_log = logging.getLogger("kvelastic.vllm")


class ElasticScheduler(Scheduler):  # type: ignore[misc]  # vLLM has no type information here
    """Overrides vLLM's scheduler: one pool session for each step.

    Its steps carry a number (`kvelastic_step`). Without an elastic pool it changes nothing.
    """

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Run vLLM's scheduling in one pool session; the resulting step is in flight afterwards."""
        pool = elastic_pool(self)
        if pool is None:
            return super().schedule(*args, **kwargs)
        memory = pool.memory
        memory.headroom = self.kv_cache_manager.watermark_blocks
        if pool.backoff is None:
            from kvelastic import config

            pool.backoff = Backoff(memory, partial(_requests_of, self))
            pool.over_limit = OverLimit(memory, config.load().limit_wait_s)
            pool.waiting = WaitingRequests(memory, pool.instance_name)
        pool.backoff.look()
        pool.short = None
        memory.report_busy(self.has_unfinished_requests())
        with pool.session():
            if pool.tiers is not None:
                pool.tiers.deliver(self)
            with _preempted_over_limit(pool, self):
                # First, because the step may copy or clear blocks that its scheduling gives back.
                step = memory.step_begins(works=False)
                output = super().schedule(*args, **kwargs)
            works = output.total_num_scheduled_tokens > 0
            if pool.tiers is not None and memory.fell_short and not works and not memory.is_at_work:
                pool.tiers.give_back_loaded(self)
            _report_waiting(pool, self)
        output.kvelastic_step = step
        if works:
            memory.step_works(step)
        pool.backoff.has_looked(works=works)
        if pool.tiers is not None:
            pool.tiers.step_is_made(
                partial(_requests_of, self), output, is_idle=not memory.is_at_work
            )
        return output

    def _inflight_prefill_reserved_blocks(self) -> int:
        """Prepare memory for a load *beside* what vLLM reserves for prompts in progress.

        vLLM admits the load if its blocks are free besides the reserved ones. It asks for the
        number of each separately, so by itself only the larger of the two would be mapped.
        """
        reserved: int = super()._inflight_prefill_reserved_blocks()
        pool = elastic_pool(self)
        if pool is not None:
            steps = getattr(self, "_spec_decode_step_blocks", 0)
            pool.memory.headroom = self.kv_cache_manager.watermark_blocks + reserved + steps
        return reserved

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The workers have executed this step: release the blocks pinned for it."""
        pool = elastic_pool(self)
        if pool is None:
            return super().update_from_output(scheduler_output, *args, **kwargs)
        pool.memory.step_ends(scheduler_output.kvelastic_step)
        if pool.tiers is not None:
            pool.tiers.step_has_run(scheduler_output)
        # A connector looks up cached blocks here; they must not move during that.
        with contextlib.nullcontext() if self.connector is None else pool.session():
            outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        pool.memory.report_busy(self.has_unfinished_requests())
        return outputs

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        """With tiers: demote before a sleep, else start a new generation."""
        tiers = getattr(elastic_pool(self), "tiers", None)
        if tiers is None:
            return bool(super().reset_prefix_cache(reset_running_requests, *args, **kwargs))
        tiers.before_reset(self, preempts=reset_running_requests)
        try:
            return bool(super().reset_prefix_cache(reset_running_requests, *args, **kwargs))
        finally:
            tiers.after_reset()


_SETTINGS_LOG = logging.getLogger("vllm.config.scheduler")

_subclasses = Subclasses(ElasticScheduler)
__getattr__ = _subclasses.find


def path_over(base: type) -> str:
    """Return the path of the subclass of a scheduler class, for vLLM's settings.

    vLLM then warns of its own scheduler's subclass; that warning is dropped.
    """
    _SETTINGS_LOG.addFilter(_is_no_warning_of_ours)
    return _subclasses.path_over(base)


def _is_no_warning_of_ours(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(f"Using custom scheduler class {__name__}.")


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
    return (
        len(scheduler.requests),
        len(scheduler.finished_req_ids),
        scheduler.num_waiting_for_streaming_input,
        scheduler.pause_state,
    )
