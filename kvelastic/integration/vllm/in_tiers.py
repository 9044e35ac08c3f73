"""Tiers in the engine core: opened with the instance, called by vLLM's connector and by each step.

How a request's blocks are loaded back, all on the scheduler's thread::

    schedule   vLLM looks up blocks (`tier_spec`, `tier_lookups`); found ones are held
               it allocates blocks for them and creates a job for its workers
               vLLM's job is dropped: tiers load beside the steps (`tiers.load`)
    ...        the request waits; if no other request can run, the engine backs off
    schedule   first, completed loads are reported to vLLM as if a worker had done them

Failed and partial loads are reported too; vLLM then computes the missing part.

A reset of the prefix cache has one of two meanings. For a sleep, the tiers keep their contents:
cached blocks are demoted first, as at the engine's end. Any other reset starts a new generation, as
new weights do.

Only the scheduler's thread calls this module.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvelastic.errors import DriverError, IntegrityError
from kvelastic.integration.vllm.tier_lookups import Lookups
from kvelastic.integration.vllm.tier_namespace import key_of
from kvelastic.pool.scheduling.memory_wait import PAUSE_S
from kvelastic.tiers.base import KEY_BYTES
from kvelastic.tiers.load import Load, Loads

if TYPE_CHECKING:
    from kvelastic.config import Config
    from kvelastic.integration.vllm.block_pool import ElasticBlockPool
    from kvelastic.tiers.manager import Tiers
    from kvelastic.tiers.stores.peer.engine import Peers

_log = logging.getLogger("kvelastic.vllm")

_PAUSE_S: Final = 0.1
"""A waiting engine runs the scheduler again after this time; requests may wait for other events."""
_END_LOADS_S: Final = 30.0
"""How long a reset waits for cancelled loads, whose running copies must complete."""

_LEAST_BLOCKS: Final = 4
"""Steps with fewer blocks are not measured: they are decode steps, not prefills."""

_KEEPS_WEIGHTS: Final = frozenset({"compute_weight_checksums", "supports_draft_weight_updates"})
_CHANGES_WEIGHTS: Final = ("weight", "load", "update")
"""A worker method whose name contains one of the strings may change the weights."""


class NamedBlock(NamedTuple):
    """A block of a request's prompt."""

    group: int
    place: int
    """Its place among the request's blocks of that group."""
    name: bytes
    """vLLM's hash of the tokens up to its end, and the group."""


class EngineTiers:
    """The tiers of one engine core, and the state of its requests' loads."""

    def __init__(self, tiers: Tiers, settings: Config, peers: Peers | None = None) -> None:
        """`peers` exchanges blocks with other engines."""
        self._tiers = tiers
        self._peers = peers
        self._settings = settings
        self._namespace = tiers.namespace
        self.lookups = Lookups(tiers, self.key_of)
        self.loads = Loads(tiers, compares=settings.tier_compare)
        self._pool: ElasticBlockPool | None = None
        self._behind: deque[tuple[int, Load]] = deque()
        """Loads that start when a step has ended, with the number of the step."""
        self._wait: _Wait | None = None
        self._last_step_s = 0.0
        self.sleeps = False
        """True if the next `_reset_caches` belongs to a sleep, which keeps the tiers."""
        self._resets_for_sleep = False

    def bind(self, pool: ElasticBlockPool) -> None:
        """Connect these tiers with the scheduler's block pool."""
        self._pool = pool
        pool.tiers = self

    @property
    def pool(self) -> ElasticBlockPool:
        """The scheduler's block pool."""
        if self._pool is None:
            raise IntegrityError("tiers were used before vLLM's scheduler had its block pool")
        return self._pool

    def key_of(self, hash_with_group: bytes) -> bytes:
        """Return the tiers' key for vLLM's block hash and group."""
        return key_of(self._namespace, hash_with_group)

    def before_exit(self) -> None:
        """Demote cached blocks before the engine exits, while its workers still run.

        Waits for farther tiers too: the next start may find nothing else.
        """
        _warn_of_lost(self._tiers.clean_before_exit(self._settings.tier_exit_s), "engine")

    def close(self) -> None:
        """Close the tiers after running copies complete."""
        self._tiers.close()

    # --- other engines --------------------------------------------------------------------------

    def expect(self, request: str, asked: dict[str, Any], blocks: Sequence[NamedBlock]) -> None:
        """A request came with the ticket of a prefill engine for these blocks.

        It may need none of them: vLLM also sends tickets of requests that its server has rejected.
        """
        if self._peers is None or not self._peers.decodes:
            return
        ticket = self._peers.ticket_in(asked)
        if ticket is not None:
            names = [one.name for one in blocks]
            keys = b"".join(map(self.key_of, names))
            self._peers.store.expect(request, ticket, keys, b"".join(map(_peer_key_of, names)))

    def needs_no_more(self, request: str) -> None:
        """The request has read its blocks of a prefill engine, which may release them."""
        if self._peers is not None:
            self._peers.store.finish(request)

    def hold(
        self, request: str, block_ids: Sequence[Sequence[int]], wanted: Sequence[NamedBlock]
    ) -> dict[str, Any] | None:
        """Hold the wanted blocks of a finished request. Returns what a decode engine needs.

        `block_ids` are the request's, for each group. Call before the blocks are freed. Returns
        None if the role has no prefill, if no block is wanted, or if no thread can be started to
        end the hold. Also if a block is missing: the others are useless without it.
        """
        if self._peers is None or not self._peers.prefills or not wanted:
            return None
        with self.pool.session():  # the native pool evicts no block before it is held
            ids = [block_ids[one.group][one.place] or self._cached(one.name) for one in wanted]
            if 0 in ids:
                _log.debug("Request %s: a block that a decode engine needs is gone.", request)
                return None
            keys = b"".join(_peer_key_of(one.name) for one in wanted)
            try:
                held = self._peers.hold(request, ids, keys)
            except DriverError as error:
                _log.error("Request %s is not held for a decode engine: %s.", request, error)
                return None
        return {"do_remote_prefill": True, "do_remote_decode": False, **held}

    def _cached(self, name: bytes) -> int:
        """Return the id of a block that has left its request's window; 0 if it is gone."""
        block = self.pool.cached_block_hash_to_block.get_one_block(name)
        # A block in use is another request's, and may not be computed yet.
        return 0 if block is None or block.ref_cnt else int(block.block_id)

    # --- loads ----------------------------------------------------------------------------------

    def begin_loads(self, made: Any) -> None:
        """Remove the load jobs from a step's output and start them.

        A block may be given to a load while a step in flight still uses it: its request was
        preempted or aborted, or the block slid out of a window. For a later step this is safe,
        because workers run steps in order. Loads run outside that order, so such a load starts
        only after that step has ended.
        """
        step = self.pool.memory.reused_under
        for job, entry in list(made.load_jobs.items()):
            del made.load_jobs[job]
            source, ids = entry.src_spec, entry.dst_spec.block_ids.tolist()
            load: Load = source.load.assign(entry.req_id, job, ids)
            if source.count == len(ids) and 0 not in ids:
                self._behind.append((step, load))
                continue
            self.loads.refuse(load)
            _log.error(
                "vLLM wants to load %d records into the blocks %s, which do not match. The tokens "
                "are computed instead. Please report this with the model's name.",
                source.count,
                ids[:8],
            )
        self._begin_behind()

    def _begin_behind(self) -> None:
        while self._behind and self.pool.memory.has_ended(self._behind[0][0]):
            self.loads.begin(self._behind.popleft()[1])

    def deliver(self, scheduler: Any) -> None:
        """Report completed loads to vLLM."""
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
            self.needs_no_more(load.request)
            known = connector._jobs.get(load.job)
            if known is not None:
                done = OffloadingWorkerMetadata(completed_jobs={load.job: known.pending_count})
                connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))
            request = scheduler.requests.get(load.request)
            if request is None:
                continue
            if load.leading < len(load.ids) and not request.is_finished():
                self._compute_rest(scheduler, connector, request, load.leading)
            scheduler._update_from_kv_xfer_finished(
                KVConnectorOutput(finished_recving={load.request})
            )

    def _compute_rest(self, scheduler: Any, connector: Any, request: Any, leading: int) -> None:
        """With several groups or with windows, a partial load has no value."""
        self.lookups.find_nothing_more(request.request_id)
        computed = 0
        status = connector._req_status.get(request.request_id)
        groups = connector.config.kv_group_configs
        if status is not None and len(groups) == 1 and not connector._sliding_window_groups:
            computed = status.num_locally_computed_tokens + leading * groups[0].tokens_per_block
        request.num_computed_tokens = min(computed, request.num_computed_tokens)
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
        _log.info(
            "Request %s: the tokens after the first %d could not be read from the tiers and are "
            "computed.",
            request.request_id,
            request.num_computed_tokens,
        )

    def give_back_loaded(self, scheduler: Any) -> None:
        """If no request runs because blocks are missing, take one waiting request's loaded blocks.

        vLLM preempts running requests only. If the limit falls after their loads, waiting requests
        could hold blocks that the others need, forever. The request finds its blocks in the cache
        or the tiers again later. Call in a session of the pool.
        """
        if not (self.loads.open or self._behind or scheduler.running):
            self._give_back_last(scheduler)

    def _give_back_last(self, scheduler: Any) -> bool:
        """Free the blocks of the last request that waits with loaded ones. False if none does."""
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
        _log.debug("Request %s releases its loaded blocks.", request.request_id)
        return True

    def end_loads(self, scheduler: Any) -> None:
        """Cancel loads and report them to vLLM. Blocks until running copies complete."""
        while self._behind:
            self.loads.refuse(self._behind.popleft()[1])
        if not self.loads.cancel_all(_END_LOADS_S):
            _log.warning("Loads from the tiers have not ended for %.0f s.", _END_LOADS_S)
        self.deliver(scheduler)

    # --- steps ----------------------------------------------------------------------------------

    def step_is_made(
        self, read_requests: Callable[[], object], output: Any, *, is_idle: bool
    ) -> None:
        """A step was scheduled. `is_idle`: no step in flight, this one included, has work.

        `read_requests` returns a value that changes when a request arrives or becomes runnable.
        """
        self._wait = _Wait(read_requests, self.loads) if is_idle and self.loads.open else None
        output.kvelastic_made_s = time.monotonic()

    @property
    def waits(self) -> bool:
        """True if nothing can run until a load completes."""
        return self._wait is not None

    def pause(self) -> bool:
        """If `waits`, wait briefly for a load. Returns True if the engine can skip the step."""
        self.loads.give_up_slow()
        return self._wait is not None and self._wait.pause()

    def step_has_run(self, output: Any) -> None:
        """Record the time per computed block, which loading from a tier has to beat.

        Steps overlap: the time of one starts when the previous one has ended.
        """
        blocks = output.total_num_scheduled_tokens // max(1, self._namespace.block_tokens)
        if blocks >= _LEAST_BLOCKS:
            began_s = max(output.kvelastic_made_s, self._last_step_s)
            self.loads.computed(blocks, time.monotonic() - began_s)
        self._last_step_s = time.monotonic()

    # --- resets ---------------------------------------------------------------------------------

    @contextmanager
    def resetting_all(self) -> Iterator[None]:
        """vLLM resets all caches in the body; for a sleep, if one was requested before."""
        self._resets_for_sleep, self.sleeps = self.sleeps, False
        try:
            yield
        finally:
            self._resets_for_sleep = False

    def before_reset(self, scheduler: Any, *, preempts: bool) -> None:
        """Call before a reset of the prefix cache. `preempts`: running requests are preempted."""
        with self.pool.session():
            self.end_loads(scheduler)
            while preempts and self._give_back_last(scheduler):
                pass  # vLLM's reset fails while any request has blocks
            if preempts and self._resets_for_sleep:
                _preempt_all(scheduler)
        if self._resets_for_sleep:
            _warn_of_lost(self._tiers.clean_all(self._settings.tier_sleep_s), "sleep")

    def after_reset(self) -> None:
        """Call after a reset, successful or not."""
        if not self._resets_for_sleep:
            self.end_generation()

    def end_generation(self) -> None:
        """Start a new generation: nothing stored so far is found again."""
        self._namespace = self._tiers.forget()
        self.lookups.forget_keys()
        if self._peers is not None:
            self._peers.held.release_all()
        _log.info("The tiers' present contents are no longer used.")

    def called_workers(self, method: Any) -> None:
        """vLLM or a client called this worker method: it may have changed the weights."""
        if method in _KEEPS_WEIGHTS:
            return
        if not isinstance(method, str) or any(part in method for part in _CHANGES_WEIGHTS):
            self.end_generation()
            if self._peers is not None:
                self._peers.store.weights_changed()


def _peer_key_of(hash_with_group: bytes) -> bytes:
    """Return the key of a block between engines. `Peers` compare everything else."""
    return hashlib.sha256(b"kvelastic peer" + hash_with_group).digest()[:KEY_BYTES]


def _preempt_all(scheduler: Any) -> None:
    """Preempt as vLLM's reset does, but earlier: only unused blocks can be demoted."""
    now_s = time.monotonic()
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), now_s, drop_stale_output=True)


class _Wait:
    """A wait for loads while nothing can run. Created after a step that had no work."""

    def __init__(self, read_requests: Callable[[], object], loads: Loads) -> None:
        self._read_requests = read_requests
        self._loads = loads
        self._requests = read_requests()
        self._ends_s = time.monotonic() + _PAUSE_S

    def pause(self) -> bool:
        """Wait up to `PAUSE_S`. Returns True if the engine can skip the step."""
        if not self._is_over():
            self._loads.wait_for_any(PAUSE_S)
        return not self._is_over()

    def _is_over(self) -> bool:
        return (
            self._loads.has_finished
            or self._read_requests() != self._requests
            or time.monotonic() >= self._ends_s
        )


_of_this_engine: EngineTiers | None = None


def set_of_this_engine(tiers: EngineTiers | None) -> None:
    """Set the tiers of this process's engine core; None removes them."""
    global _of_this_engine
    _of_this_engine = tiers


def of_this_engine() -> EngineTiers | None:
    """Return the tiers of this process's engine core, or None."""
    return _of_this_engine


def lookups_of_this_engine() -> Lookups:
    """Return the lookups of this process's engine core; without tiers they find nothing."""
    return Lookups(None, bytes) if _of_this_engine is None else _of_this_engine.lookups


def _warn_of_lost(blocks: int, why: str) -> None:
    if blocks:
        _log.warning("%d cached blocks are in no tier, and are lost with this %s.", blocks, why)
