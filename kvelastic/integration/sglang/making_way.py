"""Requests that make way for a limit: which of SGLang's running requests, and how they go.

    get_next_batch    chooses, when the pool has been over its limit for too long
    check_decode_mem  says that there is no memory, while a chosen request is in the batch
    retract_decode    retracts those that were chosen, as SGLang itself retracts: results of a step
                      on its way are dropped, and the request waits in the queue

Imports SGLang only where a batch is retracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvelastic.scheduling.over_limit import Choice, Holder

if TYPE_CHECKING:
    from kvelastic.integration.sglang.allocator import ElasticPagedAllocator


def choose(
    allocator: ElasticPagedAllocator, scheduler: Any, running_batch: Any, last_batch: Any
) -> Choice:
    """Choose the requests of this round; call it in a session.

    Beam groups and a prompt in chunks are not chosen: SGLang cannot retract them there.
    """
    allocator.making_way = ()
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
    allocator.making_way = tuple(running[index] for index in choice.requests)
    return choice


def _holder(allocator: ElasticPagedAllocator, scheduler: Any, request: Any) -> Holder:
    row = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
    slots = row[: request.kv.kv_allocated_len : allocator.page_size]
    return Holder(
        int(request.kv.kv_committed_len),
        frozenset((slots // allocator.page_size).tolist()),
    )


def retract(batch: Any, making_way: Sequence[Any]) -> list[Any]:
    """Retract those of `making_way` that are in the batch; returns them."""
    chosen = {id(request) for request in making_way}
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
    """What SGLang expects of the requests that stay."""
    from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import (
        NewTokenRatioTracker,
    )

    return float(NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs))
