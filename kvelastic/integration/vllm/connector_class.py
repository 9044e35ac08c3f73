"""vLLM's OffloadingConnector over an elastic pool, in the engine core and in the workers.

The connector copies blocks of finished requests. vLLM frees the blocks, and creates the job that
copies them one step later. A worker waits for the job only if a block is *allocated again*; it does
not wait if a page is unmapped or a block is moved. So kvelastic pins the blocks: from the end of
the request until its jobs exist, then for each job until all workers have completed it::

    request ends | its blocks are freed | step: jobs are made | ... | workers: job done
    pin of the request ------------------------->|
                                     pin of the job ------------------------->|

Only the scheduler's thread calls this. Imports vLLM, which imports this module by its name in the
settings (`connector_settings`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector

from kvelastic.integration.vllm.handoff import HANDOFF

if TYPE_CHECKING:
    from kvelastic.integration.vllm.block_pool import ElasticBlockPool
    from kvelastic.integration.vllm.in_tiers import EngineTiers


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


class OffloadingConnector(offloading_connector.OffloadingConnector):  # type: ignore[misc]
    """Pins the blocks that its jobs read. With tiers, it hands its loads to them instead.

    Has the name of vLLM's class, by which vLLM's metrics find it.
    """

    kvelastic_pins: Pins | None = None
    kvelastic_tiers: EngineTiers | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Give vLLM its own size of a block: ids are sparse in a worker's range."""
        handoff = getattr(kv_cache_config, HANDOFF, None)
        if handoff is not None:
            kv_cache_config = copy.copy(kv_cache_config)
            size_bytes = handoff.vllm_block_bytes * kv_cache_config.num_blocks
            kv_cache_config.kv_cache_tensors = [
                replace(tensor, size=size_bytes) for tensor in kv_cache_config.kv_cache_tensors
            ]
        super().__init__(vllm_config, role, kv_cache_config)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Connect with the pool if it is an elastic one."""
        super().bind_gpu_block_pool(gpu_block_pool)
        if self.connector_scheduler is None or not hasattr(gpu_block_pool, "pin"):
            return
        if hasattr(self.connector_scheduler.manager, "lookups"):  # ours, which reads no freed block
            self.kvelastic_tiers = gpu_block_pool.tiers
        else:
            self.kvelastic_pins = Pins(gpu_block_pool)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Pin the request's blocks until its jobs exist."""
        self._pin_blocks_of(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """Pin the request's blocks until its jobs exist."""
        self._pin_blocks_of(request)
        return super().request_finished_all_groups(request, block_ids)

    def _pin_blocks_of(self, request: Any) -> None:
        state = self.connector_scheduler._req_status.get(request.request_id)
        if self.kvelastic_pins is not None and state is not None:
            groups = state.group_states
            ids = (block_id for group in groups for block_id in group.block_ids)
            self.kvelastic_pins.request_ends(request.request_id, ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Pin the blocks that the new jobs read."""
        if self.kvelastic_tiers is None:
            made = super().build_connector_meta(scheduler_output)
        else:
            # vLLM asserts that every job of a preempted request is a store. Tiers have no stores,
            # and a request that a sleep preempted may load in the step that resumes it.
            made = super().build_connector_meta(replace(scheduler_output, preempted_req_ids=None))
            self.kvelastic_tiers.begin_loads(made)
        if self.kvelastic_pins is not None:
            stores = made.store_jobs.items()
            jobs = {job: entry.src_spec.block_ids.tolist() for job, entry in stores}
            self.kvelastic_pins.step_is_made(jobs, scheduler_output.finished_req_ids or ())
        return made

    def update_connector_output(self, connector_output: Any) -> None:
        """Unpin blocks whose jobs have ended."""
        super().update_connector_output(connector_output)
        if self.kvelastic_pins is not None:
            self.kvelastic_pins.jobs_left(self.connector_scheduler._jobs)

    def reset_cache(self) -> Any:
        """Unpin all blocks once the workers have ended their jobs."""
        answer = super().reset_cache()
        if self.kvelastic_pins is not None:
            self.kvelastic_pins.forget_jobs()
        return answer
