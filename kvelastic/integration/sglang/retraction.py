"""Chooses running SGLang requests to retract for a limit, and retracts them.

    get_next_batch    chooses requests once the pool has been over its limit for too long
    check_decode_mem  reports too little memory while a chosen request is in the batch
    retract_decode    retracts the chosen requests as SGLang does: the results of a step in flight
                      are dropped, and the request waits in the queue

Imports SGLang only to retract a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvelastic.pool.scheduling.over_limit import Choice, Holder

if TYPE_CHECKING:
    from kvelastic.integration.sglang.allocator import ElasticPagedAllocator


def choose(
    allocator: ElasticPagedAllocator, scheduler: Any, running_batch: Any, last_batch: Any
) -> Choice:
    """Choose the requests of this round. Call it in a session.

    Skips beam groups and partly computed prompts: SGLang cannot retract them there.
    """
    allocator.to_retract = ()
    running: list[Any] = []

    def holders() -> list[Holder]:
        batches = [running_batch]
        if last_batch is not None and last_batch.forward_mode.is_extend():
            batches.append(last_batch)  # SGLang merges it before it decodes
        requests = {id(one): one for batch in batches for one in batch.reqs or ()}
        running.extend(
            one
            for one in requests.values()
            if one.kv.holds_kv
            and one.beam_group is None
            and one is not scheduler.chunked_req
            and not one.finished()
        )
        return [_holder(allocator, scheduler, one) for one in running]

    choice = allocator.over_limit.choose(holders)
    allocator.to_retract = tuple(running[index] for index in choice.requests)
    return choice


def _holder(allocator: ElasticPagedAllocator, scheduler: Any, request: Any) -> Holder:
    row = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
    slots = row[: request.kv.kv_allocated_len : allocator.page_size]
    return Holder(
        int(request.kv.kv_committed_len), frozenset((slots // allocator.page_size).tolist())
    )


def retract(batch: Any, to_retract: Sequence[Any]) -> list[Any]:
    """Retract the requests of `to_retract` that are in the batch; return them."""
    chosen = {id(request) for request in to_retract}
    going = [index for index, one in enumerate(batch.reqs) if id(one) in chosen]
    if not going:
        return []
    retracted = [batch.reqs[index] for index in going]
    for index in going:
        batch.release_req(index, 0)
    staying = [index for index, one in enumerate(batch.reqs) if id(one) not in chosen]
    batch.filter_batch(keep_indices=staying)
    return retracted


def ratio_after(batch: Any) -> float:
    """Return SGLang's new-token ratio for the requests that stay."""
    from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import (
        NewTokenRatioTracker,
    )

    return float(NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs))
