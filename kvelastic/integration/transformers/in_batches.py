"""Wrappers for the loop of continuous batching: sessions, waiting for memory, preemption."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvelastic.integration.transformers.in_cache import batches_of, blocks_of, count_blocks
from kvelastic.pool.scheduling.over_limit import Holder

if TYPE_CHECKING:
    from kvelastic.integration.transformers.batches import Batches

_log = logging.getLogger("kvelastic.transformers")

_BACKOFF_S: Final = 0.05
"""Maximum wait for memory before the loop checks its requests again."""
_STAYS: Final = "kvelastic"
"""Key of a placeholder for one more active request."""
_MORE_THAN_FITS: Final = 1 << 40
"""A number of tokens or blocks (depending on the series) that fits in no cache."""


def decide_use_async_batching(
    original: Callable[..., None], cb_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Default to one batch at a time. Explicit asynchronous batching is refused later."""
    if cb_config.use_async_batching is None:
        cb_config.use_async_batching = False
    original(cb_config, *args, **kwargs)


def processor_init(
    original: Callable[..., None], processor: Any, *args: Any, **kwargs: Any
) -> None:
    """Register the stream with the driver, and run every scheduling attempt in a session."""
    original(processor, *args, **kwargs)
    batches = batches_of(processor.cache)
    if batches is None:
        return
    batches.name_streams(processor.inputs_and_outputs.compute_stream)
    schedule = processor.scheduler.schedule_batch

    def schedule_batch(*args: Any, **kwargs: Any) -> Any:
        batches.blocks.report_busy(True)
        with batches.blocks.session():
            _lift_admission(batches, processor.scheduler)
            _preempt_over_limit(batches, processor)
            scheduled = schedule(*args, **kwargs)
        batches.found_none = scheduled[0] is None
        return scheduled

    # Replaced on the object, so that it works for every scheduler class.
    processor.scheduler.schedule_batch = schedule_batch


def _lift_admission(batches: Batches, scheduler: Any) -> None:
    """Admit requests again if the pool has grown since a request was preempted.

    transformers admits none after a preemption until a request ends, because its own cache does not
    grow.
    """
    if scheduler.block_new_requests and batches.blocks.has_grown:
        scheduler.block_new_requests = False


def _preempt_over_limit(batches: Batches, processor: Any) -> None:
    """Preempt requests if they have kept the pool over its limit for too long.

    transformers preempts starved requests from the end of the list, where the cheapest one is.
    """
    scheduler = processor.scheduler
    active = list(scheduler.active_requests.values())
    choice = batches.over_limit.choose(
        lambda: [
            Holder(state.position_offset, blocks_of(processor.cache, state.request_id))
            for state in active
        ]
    )
    if not choice.requests:
        return
    _log.info("Running requests preempted for the limit: up to %d.", len(choice.requests))
    scheduler.starved_requests = [
        (active[index], _MORE_THAN_FITS) for index in reversed(choice.requests)
    ]
    batches.found_none = False
    # transformers keeps one request active. With the placeholder it can preempt all, because even
    # one request may have blocks on pages over the limit.
    scheduler.active_requests[_STAYS] = None
    try:
        processor.offloading_manager.offload_requests()
    finally:
        del scheduler.active_requests[_STAYS]


def prepare_next_batch(original: Callable[..., bool], processor: Any) -> bool:
    """Wait if no request fits now; transformers would end its loop with an error.

    Between waits the loop checks its requests: one may be cancelled, or a new one may fit.
    """
    batches = batches_of(processor.cache)
    if batches is None:
        return original(processor)
    from kvelastic.integration.transformers.batches import NothingFits

    ready = False
    while True:
        seen = (
            batches.blocks.availability_epoch
        )  # before the attempt, so that no new memory is missed
        try:
            ready = original(processor)
        except NothingFits:
            _report_waiting(batches, processor)
            if batches.blocks.wait_for_epoch(seen, _BACKOFF_S):
                continue
        break
    if ready or not processor.has_pending_requests():
        batches.waiting.report(0)
    batches.blocks.report_busy(processor.has_pending_requests())
    batches.batch_is_ready(
        ready,
        is_padded=processor.model_runner.pad_inputs,
        stream=processor.inputs_and_outputs.compute_stream,
    )
    return ready


def _report_waiting(batches: Batches, processor: Any) -> None:
    """Report how many requests wait for memory while none runs, and what the first one needs."""
    scheduler, cache = processor.scheduler, processor.cache
    waiting = [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]
    if not waiting:
        return
    first = waiting[0]
    # What was generated before a preemption is part of the prompt after it. The last token of a
    # response is never computed, so it needs no room.
    tokens = len(first.initial_tokens) + max(0, len(first.generated_tokens) - 1)
    longest = len(first.initial_tokens) + max(0, (first.max_new_tokens or 1) - 1)
    batches.waiting.report(
        len(waiting),
        first_blocks=count_blocks(cache, tokens),
        first_may_blocks=count_blocks(cache, max(tokens, longest)),
    )


def update_batch(original: Callable[..., None], processor: Any) -> None:
    """Run the update in one session: ended requests release blocks, others share theirs."""
    batches = batches_of(processor.cache)
    if batches is None:
        original(processor)
        return
    with batches.blocks.session():
        original(processor)
    batches.batch_is_computed()
    batches.blocks.report_busy(processor.has_pending_requests())


def offload_requests(original: Callable[..., bool], manager: Any) -> bool:
    """Preempt requests. Their blocks are copied after they are freed, so this runs in a step.

    Raises `NothingFits` if no batch could be scheduled and no request is left to preempt.
    """
    batches = batches_of(manager.cache)
    if batches is None:
        return original(manager)
    from kvelastic.integration.transformers.batches import NothingFits

    waiting = len(manager.scheduler.waiting_requests)
    with batches.blocks.session(), batches.blocks.step():
        has_changed = original(manager)
    preempted = len(manager.scheduler.waiting_requests) - waiting
    if preempted:
        batches.preempted += preempted
        _log.debug("%d requests gave their blocks up for others.", preempted)
    if batches.found_none and not has_changed:
        raise NothingFits
    return has_changed


def manager_stop(original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    """Release the cache's memory when the manager stops, even if the cache is still referenced."""
    processor = manager.batch_processor
    original(manager, *args, **kwargs)
    if processor is None or manager.batch_processor is not None or manager.is_running():
        return
    batches = batches_of(processor.cache)
    if batches is not None:
        batches.close()


def warm_up(original: Callable[..., None], runner: Any, model: Any) -> None:
    """Capture and compile with the trash sector, so that warm-up requests take no memory."""
    batches = batches_of(runner.cache)
    if batches is None:
        original(runner, model)
        return
    batches.source.warms_up = True
    try:
        original(runner, model)
    finally:
        batches.source.warms_up = False
