"""Wrappers for vLLM's OffloadingConnector, in the engine core and in the workers.

The connector copies blocks of finished requests. vLLM frees the blocks, and creates the job that
copies them one step later. A worker waits for the job only if a block is *allocated again*; it does
not wait if a page is unmapped or a block is moved. So kvelastic pins the blocks: from the end of
the request until its jobs exist, then for each job until all workers have completed it::

    request ends | its blocks are freed | step: jobs are made | ... | workers: job done
    pin of the request ------------------------->|
                                     pin of the job ------------------------->|

`connector` below is vLLM's `OffloadingConnectorScheduler`. Only the scheduler's thread calls these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvelastic.integration.vllm.handoff import HANDOFF

if TYPE_CHECKING:
    from kvelastic.integration.vllm.block_pool import ElasticBlockPool


class Pins:
    """The pins of one connector's jobs in its pool."""

    def __init__(self, pool: ElasticBlockPool) -> None:
        self._pool = pool
        self._of_requests: dict[str, int] = {}
        self._of_jobs: dict[int, int] = {}

    def request_ends(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Pin a finished request's blocks; vLLM creates jobs for them in the next step."""
        self._of_requests[request_id] = self._pool.pin(dict.fromkeys(block_ids))

    def step_is_made(self, jobs: dict[int, Iterable[int]], ended_requests: Iterable[str]) -> None:
        """Pin the blocks that each new job reads; unpin those of the finished requests."""
        for job, block_ids in jobs.items():
            self._of_jobs[job] = self._pool.pin(dict.fromkeys(block_ids))
        for request_id in ended_requests:
            if (ticket := self._of_requests.pop(request_id, None)) is not None:
                self._pool.memory.unpin(ticket)

    def jobs_left(self, jobs: Iterable[int]) -> None:
        """Unpin the blocks of every job except these, which workers have not completed."""
        for job in self._of_jobs.keys() - set(jobs):
            self._pool.memory.unpin(self._of_jobs.pop(job))

    def forget_jobs(self) -> None:
        """vLLM has dropped its jobs. Unpin after the next step, which ends them in the workers."""
        for job in list(self._of_jobs):
            self._pool.memory.unpin_after_next_step(self._of_jobs.pop(job))


def bind_gpu_block_pool(original: Callable[..., Any], connector: Any, pool: Any) -> None:
    """Connect the connector with the pool if it is an elastic one."""
    original(connector, pool)
    scheduler_side = connector.connector_scheduler
    if scheduler_side is None or not hasattr(pool, "pin"):
        return
    if hasattr(scheduler_side.manager, "lookups"):  # ours, which reads no freed block
        scheduler_side.kvelastic_tiers = pool.tiers
    else:
        scheduler_side.kvelastic_pins = Pins(pool)


def request_finished(original: Callable[..., Any], connector: Any, request: Any) -> Any:
    """Pin the request's blocks until its jobs exist."""
    pins = _pins_of(connector)
    state = connector._req_status.get(request.request_id)
    if pins is not None and state is not None:
        groups = state.group_states
        pins.request_ends(request.request_id, (id_ for group in groups for id_ in group.block_ids))
    return original(connector, request)


def build_connector_meta(original: Callable[..., Any], connector: Any, output: Any) -> Any:
    """Pin the blocks that the new jobs read."""
    tiers = getattr(connector, "kvelastic_tiers", None)
    if tiers is None:
        made = original(connector, output)
    else:
        # vLLM asserts that every job of a preempted request is a store. Tiers have no stores, and
        # a request that a sleep preempted may load in the step that resumes it.
        made = original(connector, replace(output, preempted_req_ids=None))
        tiers.begin_loads(made)
    pins = _pins_of(connector)
    if pins is not None:
        jobs = {job: entry.src_spec.block_ids.tolist() for job, entry in made.store_jobs.items()}
        pins.step_is_made(jobs, output.finished_req_ids or ())
    return made


def update_connector_output(original: Callable[..., Any], connector: Any, output: Any) -> None:
    """Unpin blocks whose jobs have ended."""
    original(connector, output)
    pins = _pins_of(connector)
    if pins is not None:
        pins.jobs_left(connector._jobs)


def reset_cache(original: Callable[..., Any], connector: Any) -> Any:
    """Unpin all blocks once the workers have ended their jobs."""
    answer = original(connector)
    pins = _pins_of(connector)
    if pins is not None:
        pins.forget_jobs()
    return answer


def build_config(
    original: Callable[..., Any], vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Use vLLM's own block size in a worker's configuration: ids are sparse in the range."""
    made = original(vllm_config, kv_cache_config, *args, **kwargs)
    handoff = getattr(kv_cache_config, HANDOFF, None)
    if handoff is None:
        return made
    return replace(made, worker_kv_bytes_per_block=handoff.vllm_block_bytes)


def _pins_of(connector: Any) -> Pins | None:
    return getattr(connector, "kvelastic_pins", None)
