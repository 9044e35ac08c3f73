"""Tiers in the engine core: opened with the instance, asked by vLLM's connector, told by its steps.

How a request's blocks come back, all in the scheduler's process::

    schedule   vLLM asks for blocks (`tier_spec`, `tier_lookups`); what is found is held
               it takes blocks for them, and makes a job for its workers
               the job is taken out of the step: the tiers load beside the steps (`tiers/loads.py`)
    ...        the request waits; where nothing else can run, the engine naps
    schedule   first, what has been loaded is told to vLLM as if a worker had: the request runs

A load that has failed, or a part of one, is told too: vLLM computes what is missing. What a reset
of the prefix cache means is said here as well: that of a sleep keeps the tiers, and demotes first,
as the end of the engine does; every other ends the generation, as new weights do.

Everything here is called by the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kvelastic.errors import IntegrityError
from kvelastic.integration.vllm.in_engine_core import requests_of
from kvelastic.integration.vllm.tier_lookups import Found, Lookups, MatchingTiers
from kvelastic.integration.vllm.tier_namespace import key_of
from kvelastic.scheduling.starvation import NAP_S
from kvelastic.tiers.loads import LoadingTiers, Loads

if TYPE_CHECKING:
    from kvelastic.integration.vllm.block_pool import ElasticBlockPool
    from kvelastic.tiers.namespace import Namespace

_log = logging.getLogger("kvelastic.vllm")

_PAUSE_S: Final = 0.1
"""vLLM is asked again after so long all the same: requests may wait for other things, too."""
_END_LOADS_S: Final = 30.0
"""How long a reset waits for loads that were cancelled: for copies that have begun."""

_LEAST_BLOCKS: Final = 4
"""Of a step that is measured as one that computes blocks: a prompt's, not one of single tokens."""

_KEEPS_WEIGHTS: Final = frozenset({"compute_weight_checksums"})
_CHANGES_WEIGHTS: Final = ("weight", "load", "update")
"""Parts of names of workers' methods after which nothing is certain."""


class Tiers(MatchingTiers, LoadingTiers, Protocol):
    """What an engine needs of its tiers."""

    @property
    def namespace(self) -> Namespace:
        """What keys are made for."""

    def forget(self) -> Namespace:
        """Nothing stored so far is found any more; answers what keys are made for from now on."""

    def clean_all(self, timeout_s: float) -> int:
        """Copy what is cached; answers how many blocks have no copy then. Blocks that long."""

    def clean_before_exit(self, timeout_s: float) -> int:
        """The same, also to farther tiers."""

    def close(self) -> object:
        """Let go of everything. Repeatable."""


class _Behind(NamedTuple):
    """A load that begins when a step has ended."""

    step: int
    request: str
    job: int
    match: Found
    ids: list[int]


class EngineTiers:
    """The tiers of one engine core, and where its requests are with them."""

    def __init__(
        self, tiers: Tiers, *, sleep_wait_s: float, exit_wait_s: float, compares: bool
    ) -> None:
        """`sleep_wait_s` and `exit_wait_s` are how long a sleep and the engine's end wait at most
        until what is cached is demoted; `compares`: tiers are given up where computing is quicker.
        """
        self._tiers = tiers
        self._sleep_wait_s = sleep_wait_s
        self._exit_wait_s = exit_wait_s
        self._namespace = tiers.namespace
        self.lookups = Lookups(tiers, self.key_of)
        self.loads = Loads(tiers, compares=compares)
        self._pool: ElasticBlockPool | None = None
        self._behind: deque[_Behind] = deque()
        self._wait: _Wait | None = None
        self._last_step_s = 0.0
        self.sleeps = False
        """Whether the next reset of all caches is a sleep's, which keeps the tiers."""
        self._resets_for_sleep = False

    def bind(self, pool: ElasticBlockPool) -> None:
        """Know the pool, which knows these tiers from here on."""
        self._pool = pool
        pool.tiers = self

    @property
    def pool(self) -> ElasticBlockPool:
        """The scheduler's block pool."""
        if self._pool is None:
            raise IntegrityError("tiers were used before vLLM's scheduler had its block pool")
        return self._pool

    def key_of(self, hash_with_group: bytes) -> bytes:
        """The tiers' key of a block that vLLM knows by its hash and group."""
        return key_of(self._namespace, hash_with_group)

    def before_exit(self) -> None:
        """The engine is about to end, with its workers still there: what is cached is demoted.

        Also to farther tiers, which may be all that the next start finds.
        """
        _warn_of_lost(self._tiers.clean_before_exit(self._exit_wait_s), "engine")

    def close(self) -> None:
        """Let go of the tiers; copies that have begun end first."""
        self._tiers.close()

    # --- loads ----------------------------------------------------------------------------------

    def begin_loads(self, made: Any) -> None:
        """Take the loads out of what a step tells its workers, and begin them.

        A block of a request that was preempted or aborted, or one that slid out of a window, may be
        in use by a step that is on its way and yet be given to a load at once, as to any later
        step. Loads are in no queue of the workers, so such a load begins when that step has ended.
        """
        step = self.pool.memory.reused_under
        for job, entry in list(made.load_jobs.items()):
            del made.load_jobs[job]
            source, ids = entry.src_spec, entry.dst_spec.block_ids.tolist()
            if source.count == len(ids) and 0 not in ids:
                self._behind.append(_Behind(step, entry.req_id, job, source.match, ids))
                continue
            source.match.release()
            self.loads.refuse(entry.req_id, job, len(ids))
            _log.error(
                "vLLM wants %d records in the blocks %s: they are computed instead. Please report "
                "this with the model's name.",
                source.count,
                ids[:8],
            )
        self._begin_behind()

    def _begin_behind(self) -> None:
        while self._behind and self.pool.memory.has_ended(self._behind[0].step):
            _, request, job, match, ids = self._behind.popleft()
            self.loads.begin(request, job, match, ids)

    def deliver(self, scheduler: Any) -> None:
        """Tell vLLM which loads are over."""
        self._begin_behind()
        self.loads.give_up_slow()
        if not self.loads.has_finished:
            return
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.v1.outputs import KVConnectorOutput

        connector = scheduler.connector.connector_scheduler
        for load in self.loads.take_finished():
            known = connector._jobs.get(load.job)
            if known is not None:
                done = OffloadingWorkerMetadata(completed_jobs={load.job: known.pending_count})
                connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))
            request = scheduler.requests.get(load.request)
            if request is None:
                continue
            if load.leading < load.blocks and not request.is_finished():
                self._compute_rest(scheduler, connector, request, load.leading)
            scheduler._update_from_kv_xfer_finished(
                KVConnectorOutput(finished_recving={load.request})
            )

    def _compute_rest(self, scheduler: Any, connector: Any, request: Any, leading: int) -> None:
        """Of several groups, or of windows, a part is worth nothing."""
        self.lookups.find_nothing_more(request.request_id)
        computed = 0
        status = connector._req_status.get(request.request_id)
        groups = connector.config.kv_group_configs
        if status is not None and len(groups) == 1 and not connector._sliding_window_groups:
            computed = status.num_locally_computed_tokens + leading * groups[0].tokens_per_block
        request.num_computed_tokens = min(computed, request.num_computed_tokens)
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
        _log.info(
            "Of request %s, what follows the first %d tokens could not be read from the tiers: it "
            "is computed.",
            request.request_id,
            request.num_computed_tokens,
        )

    def give_back_loaded(self, scheduler: Any) -> None:
        """Nothing runs for want of blocks: of those that wait with loaded blocks, one gives way.

        vLLM preempts what runs, and nothing else: under a limit that came after their loads,
        requests would hold what each other needs for ever. It finds its blocks again later. In a
        session of the pool.
        """
        if not (self.loads.open or self._behind or scheduler.running):
            self._give_back_last(scheduler)

    def _give_back_last(self, scheduler: Any) -> bool:
        """Of the requests that wait with loaded blocks the last one; whether there was one."""
        for request in reversed(list(scheduler.kv_holding_waiting)):
            if scheduler._handle_blocked_waiting_request(request) and request.num_computed_tokens:
                break
        else:
            return False
        scheduler.kv_holding_waiting.remove_requests([request])
        scheduler.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        scheduler._inflight_prefills.discard(request)
        scheduler.waiting.prepend_request(request)
        _log.debug("Request %s gives its loaded blocks back.", request.request_id)
        return True

    def end_loads(self, scheduler: Any) -> None:
        """End what is on its way, and tell vLLM. Blocks while copies that have begun end."""
        while self._behind:
            _, request, job, match, ids = self._behind.popleft()
            match.release()
            self.loads.refuse(request, job, len(ids))
        if not self.loads.cancel_all(_END_LOADS_S):
            _log.warning("Loads from the tiers have not ended for %.0f s.", _END_LOADS_S)
        self.deliver(scheduler)

    # --- steps ----------------------------------------------------------------------------------

    def step_is_made(self, scheduler: Any, output: Any, *, is_idle: bool) -> None:
        """A step was scheduled; `is_idle`: neither it nor one before has anything to do."""
        self._wait = _Wait(scheduler, self.loads) if is_idle and self.loads.open else None
        output.kvelastic_made_s = time.monotonic()

    @property
    def waits(self) -> bool:
        """Whether nothing can run until a load is over."""
        return self._wait is not None

    def nap(self) -> bool:
        """Where `waits`, wait for a load a moment; whether to go on without a step."""
        self.loads.give_up_slow()
        return self._wait is not None and self._wait.nap()

    def step_has_run(self, output: Any) -> None:
        """A step of so many tokens took so long: what a tier has to beat.

        Steps overlap: the time of one begins where the one before has ended.
        """
        blocks = output.total_num_scheduled_tokens // max(1, self._namespace.block_tokens)
        if blocks >= _LEAST_BLOCKS:
            began_s = max(output.kvelastic_made_s, self._last_step_s)
            self.loads.computed(blocks, time.monotonic() - began_s)
        self._last_step_s = time.monotonic()

    # --- resets ---------------------------------------------------------------------------------

    @contextmanager
    def resetting_all(self) -> Iterator[None]:
        """vLLM resets all caches in the body: before a sleep, if one was asked for."""
        self._resets_for_sleep, self.sleeps = self.sleeps, False
        try:
            yield
        finally:
            self._resets_for_sleep = False

    def before_reset(self, scheduler: Any, *, preempts: bool) -> None:
        """The prefix cache is about to be reset; `preempts`: requests that run give way to it."""
        with self.pool.session():
            self.end_loads(scheduler)
            while preempts and self._give_back_last(scheduler):
                pass  # as those that run: vLLM fails such a reset while any has blocks
            if preempts and self._resets_for_sleep:
                _preempt_all(scheduler)
        if self._resets_for_sleep:
            _warn_of_lost(self._tiers.clean_all(self._sleep_wait_s), "sleep")

    def after_reset(self) -> None:
        """It was reset, or vLLM could not."""
        if not self._resets_for_sleep:
            self.end_generation()

    def end_generation(self) -> None:
        """Nothing that was stored so far is found again."""
        self._namespace = self._tiers.forget()
        self.lookups.forget_keys()
        _log.info("The tiers' present contents are no longer used.")

    def called_workers(self, method: Any) -> None:
        """A method of the workers was called from outside: it may have changed the weights."""
        if method in _KEEPS_WEIGHTS:
            return
        if not isinstance(method, str) or any(part in method for part in _CHANGES_WEIGHTS):
            self.end_generation()


def _preempt_all(scheduler: Any) -> None:
    """What vLLM's reset does first, earlier: blocks are copied only once nobody uses them."""
    now_s = time.monotonic()
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), now_s, drop_stale_output=True)


class _Wait:
    """Nothing can run until a load is over. Made after the step that found that out."""

    def __init__(self, scheduler: Any, loads: Loads) -> None:
        self._scheduler = scheduler
        self._loads = loads
        self._requests = requests_of(scheduler)
        self._ends_s = time.monotonic() + _PAUSE_S

    def nap(self) -> bool:
        """Wait `NAP_S` at most; whether to go on without a step."""
        if not self._is_over():
            self._loads.wait_for_any(NAP_S)
        return not self._is_over()

    def _is_over(self) -> bool:
        return (
            self._loads.has_finished
            or requests_of(self._scheduler) != self._requests
            or time.monotonic() >= self._ends_s
        )


_of_this_engine: EngineTiers | None = None


def set_of_this_engine(tiers: EngineTiers | None) -> None:
    """The engine core of this process has these tiers from here on; None: none any more."""
    global _of_this_engine
    _of_this_engine = tiers


def of_this_engine() -> EngineTiers | None:
    """The tiers of the engine core in this process."""
    return _of_this_engine


def lookups_of_this_engine() -> Lookups:
    """Of the engine core in this process; where no tier is of use, nothing is found."""
    return Lookups(_NoTiers(), bytes) if _of_this_engine is None else _of_this_engine.lookups


class _NothingFound:
    count = 0

    def release(self) -> None:
        """Nothing is held."""


class _NoTiers:
    """All that were asked for are of no use here: a host tier for a cache in host memory."""

    def match(self, keys: bytes, *, chain_after: bytes = b"") -> Found:
        """Nothing."""
        return _NothingFound()


def _warn_of_lost(blocks: int, why: str) -> None:
    if blocks:
        _log.warning("%d cached blocks are in no tier, and are lost with this %s.", blocks, why)
