"""Tiers of one pool: look up, load and demote blocks.

    tiers = open_tiers(pool, settings, namespace)      # see `opening`
    with tiers.match(keys) as load:
        ids = blocks.alloc(load.count)
        tiers.load(load, ids)
    load.wait(1.0)                                       # load.failed: indices to compute
    tiers.close()

No method raises because a tier's medium failed. A failed read counts as a miss, a failed write as
not stored. All methods are thread-safe. `match`, `load` and the properties do not wait for a
medium, provided that the stores keep their contract.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvelastic import _vmm
from kvelastic.errors import IntegrityError, InvalidArgumentError, KvelasticError
from kvelastic.shared.tier_status import BlockCounts
from kvelastic.tiers.base import (
    KEY_BYTES,
    NO_KEY,
    Selection,
    Store,
    count_of,
)
from kvelastic.tiers.costs import Costs
from kvelastic.tiers.demoter import Demoter
from kvelastic.tiers.executor import Executor
from kvelastic.tiers.graph import NO_TIER, Graph, load_graph
from kvelastic.tiers.lineage import Lineage
from kvelastic.tiers.load import Load
from kvelastic.tiers.lookup import Lookup, Segment
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.policy import Rules
from kvelastic.tiers.transfer_run import Priority, Run, Transfer
from kvelastic.tiers.workers import Call, Workers
from kvelastic.tiers.write_behind import WriteBehind

_log = logging.getLogger("kvelastic")

CLOSE_S = 5.0
"""Default timeout of `close` and `drain`."""
EXIT_S = 2.0
"""Timeout of the `close` at process exit, if the process has not closed its tiers."""
CALLS_AT_ONCE = 4
"""Calls of operators that one store gets at a time."""
ERASE_S = 60.0
"""How long `erase` and `forget` wait for a store."""
LOAD_BATCH = 8
"""Minimum number of blocks in one read: a sufficient queue depth for a disk."""
LOAD_BATCH_BYTES = 8 << 20
"""Target size of one read of small blocks. It amortizes the fixed cost of each read and copy."""
LOAD_BATCHES = 4
"""Number of batches a long load is split into, so that reads overlap copies to the device."""

_LOOK_S = 0.25
"""Interval at which a waiting call checks whether the tier has stalled."""

_T = TypeVar("_T")


class Tiers:
    """The tiers of one pool. Thread-safe.

    `stores` are nearest first. The tiers own them and close them.
    """

    def __init__(
        self,
        blocks: _vmm.Pool,
        staging: _vmm.Staging,
        namespace: Namespace,
        stores: Sequence[Store],
        rules: Rules | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Enters the namespace in every store and starts the threads.

        Raises `InvalidArgumentError` if the record size of a store differs from that of staging.
        """
        for store in stores:
            if store.record_bytes != staging.record_bytes:
                raise InvalidArgumentError(
                    f"tier {store.name} has records of {store.record_bytes} bytes, and staging of"
                    f" {staging.record_bytes}; open it for the pool's"
                )
        self._blocks = blocks
        self._staging = staging
        self._namespace = namespace
        self._stores = tuple(stores)
        self._rules = Rules() if rules is None else rules
        self._costs = Costs(len(stores), clock)
        self._lineage = Lineage()
        self._lookup = Lookup(stores)
        self._lock = threading.Lock()
        """Guards the counts, the namespace and the epoch. No other lock is taken inside it."""
        self._matched = self._unmatched = self._loaded = self._missed = 0
        self._demotes = any(store.takes_records for store in stores)
        if self._demotes:
            blocks.use_tiers(
                reclaim_wait_s=self._rules.reclaim_s,
                limit_wait_s=self._rules.limit_s,
                sleep_wait_s=self._rules.sleep_s,
            )
        self._epoch = 0
        """Incremented on each erasure. A record read in an earlier epoch no longer counts as a copy
        of its block."""
        self._is_closed = False
        self._users: list[Callable[[], None]] = []
        """The `close` of each object that uses the tiers."""
        self._callers = [Workers("kvelastic-ask", CALLS_AT_ONCE) for _ in stores]
        """For each tier, the threads of `_in_stores`."""
        for store in stores:
            store.enter(namespace)
        self._executor = Executor(blocks, staging, stores, clock=clock, loaded=self._costs.loaded)
        self._behind = WriteBehind(
            self._executor, tiers=self._tiers_that_take, capacity=self._nearest_capacity
        )
        self._demoter = Demoter(
            blocks,
            self._executor,
            self._rules,
            self._behind,
            record_bytes=staging.record_bytes,
            tiers=self._tiers_that_take,
            parents=self._lineage.parents,
            clock=clock,
        )
        if self._demotes:
            self._demoter.start()
        # If the process does not close its tiers, no thread may be inside a store or the pool when
        # the interpreter exits.
        self._pid = os.getpid()
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        if self._pid == os.getpid():  # a forked child has none of the threads
            self.close(EXIT_S)

    # --- lookup and load -----------------------------------------------------------------------

    @property
    def namespace(self) -> Namespace:
        """The current namespace. The engine makes keys for it."""
        with self._lock:
            return self._namespace

    def match(self, keys: bytes, *, chain_after: bytes = NO_KEY) -> Load:
        """Find and hold the leading keys that are in tiers, each in the nearest tier that has it.

        Each key continues the previous one. The first key continues `chain_after`; NO_KEY means
        that it begins a prompt. Release what is not loaded when the step ends. A tier is skipped
        if it is stalled or if computing the blocks is faster. Raises `InvalidArgumentError` if the
        length of `keys` is not a multiple of `KEY_BYTES`.
        """
        count = count_of(keys)
        self._lineage.note(keys, chain_after)
        with self._lock:
            epoch = self._epoch
        held, holds = self._lookup.hold_leading(keys, self._may_ask)
        load = Load(keys, held, holds, chain_after, epoch)
        with self._lock:
            self._matched += load.count
            self._unmatched += count - load.count
        return load

    def _may_ask(self, tier: int) -> bool:
        return (
            self._stores[tier].is_ready
            and tier not in self._executor.stuck_tiers
            and self._costs.worth_asking(tier)
        )

    def load(self, load: Load, ids: Sequence[int]) -> Load:
        """Start loading the first `len(ids)` keys that were found into these blocks. Never blocks.

        The blocks must be in use. They receive these keys, and loaded blocks are marked clean. The
        records stay held until the load is done. If `erase` or `forget` was called since they were
        found, the load loads nothing. Returns the load. Raises `InvalidArgumentError` if there are
        more blocks than keys were found, or if the load was started or released before.
        """
        load.starts(ids)
        try:
            run = self._start(load, ids)
        except BaseException:
            load.end()
            raise
        load.runs(run)
        run.on_complete(partial(self._end_load, load))
        if not self._is_current(load.epoch):  # an erasure in between did not see this run
            run.cancel()
        return load

    def _start(self, load: Load, ids: Sequence[int]) -> Run:
        segments = [
            Segment(s.tier, s.first, min(s.count, len(ids) - s.first))
            for s in load.segments
            if s.first < len(ids)
        ]
        nearest_kept = self._tiers_that_take()[:1]
        graph = load_graph(
            segments,
            batch=self._load_batch(len(ids)),
            promote_to=nearest_kept[0] if nearest_kept else NO_TIER,
            copies=self._rules.copies,
        )
        if not self._is_current(load.epoch):
            # A load also promotes records to a nearer tier, where others would find them again.
            graph = Graph((), len(ids))
        keys = load.keys[: len(ids) * KEY_BYTES]
        # Name the blocks now, while they are certainly in use. The engine computes blocks that
        # fail to load, under the same key.
        self._blocks.name_blocks(ids, keys)
        return self._executor.submit(
            Transfer(graph, keys, tuple(ids), load.parents[: len(ids)]), Priority.LOAD
        )

    def _end_load(self, load: Load, run: Run) -> None:
        try:
            self._note_load(run, load.epoch)
        finally:
            load.end()

    def _load_batch(self, count: int) -> int:
        """Return the number of blocks in one read of a load of `count` blocks.

        At most a quarter of the staging slots, so that several reads fit.
        """
        of_bytes = LOAD_BATCH_BYTES // self._staging.record_bytes
        batch = max(LOAD_BATCH, min(of_bytes, -(-count // LOAD_BATCHES)))
        return min(batch, max(1, self._staging.slots // 4))

    def _is_current(self, epoch: int) -> bool:
        """Return whether nothing was erased since `epoch`."""
        with self._lock:
            return epoch == self._epoch

    def _note_load(self, run: Run, epoch: int) -> None:
        loaded = [at for at, is_loaded in enumerate(run.loaded) if is_loaded]
        with self._lock:
            self._loaded += len(loaded)
            self._missed += len(run.loaded) - len(loaded)
        # The pool skips blocks that have another key by now, or none.
        if loaded and self._is_current(epoch):
            transfer = run.transfer
            self._blocks.mark_clean([transfer.ids[at] for at in loaded], transfer.keys_of(loaded))

    def clean_all(self, timeout_s: float) -> int:
        """Copy all cached blocks that have keys to tiers. Returns how many blocks have no copy.

        For an engine that is about to drop its cache, such as vLLM before it sleeps. Blocks for at
        most `timeout_s` plus one copy. Returns 0 at once if no store takes records.
        """
        return self._blocks.clean(timeout_s) if self._demotes else 0

    def clean_before_exit(self, timeout_s: float) -> int:
        """Copy all cached blocks that have keys to tiers, including the farther tiers.

        After a restart the engine may find only the farther tiers. Returns how many blocks have no
        copy. Logs a warning if copies to farther tiers are incomplete after `timeout_s`. Blocks
        for at most `timeout_s` plus one copy.
        """
        until_s = time.monotonic() + timeout_s
        left = self.clean_all(timeout_s)
        if not self.drain(max(0.0, until_s - time.monotonic())):
            _log.warning("Blocks not yet copied to the farther tiers are lost with this engine.")
        return left

    def computed(self, blocks: int, seconds: float) -> None:
        """Report that the engine computed `blocks` blocks in `seconds`.

        Tiers that load more slowly are skipped.
        """
        self._costs.computed(blocks, seconds)

    @property
    def compute_s(self) -> float | None:
        """Seconds to compute one block; None until the engine has reported a measurement."""
        return self._costs.compute_s

    # --- forgetting ----------------------------------------------------------------------------

    def forget(self) -> Namespace:
        """Start a new generation, in which no stored record is found. Returns the new namespace.

        Use it to reset the prefix cache, or when weights or adapters change in place. The engine
        must make all further keys for the new namespace. Records in this process's own memory are
        erased. Records in other tiers remain until they are evicted or removed by `erase`, and a
        restarted engine finds them again. Blocks: waits for running copies and writes, and up to
        a minute for the stores.
        """
        with self._quiet():
            with self._lock:
                old = self._namespace
                # Random: a counter could collide with that of another process.
                self._namespace = replace(old, generation=secrets.randbits(62))
                new = self._namespace
                self._epoch += 1
            # Include stalled stores: the call takes effect when the disk responds.
            self._in_stores(lambda store: store.enter(new), ERASE_S, also_stalled=True)
            own = [tier for tier, store in enumerate(self._stores) if store.name == "host"]
            self._in_stores(
                lambda store: store.erase_matching(Selection(namespace=old, every_generation=True)),
                ERASE_S,
                own,
            )
            self._blocks.forget_copies()
        return new

    def erase(self, selection: Selection | None = None) -> dict[int, int]:
        """Erase records in every tier. Returns the number of erased records by tier index.

        `selection` None selects the current namespace in all its generations. A tier that is not
        ready is skipped, unless the selection covers all namespaces. A tier that is stalled, or
        takes longer than a minute, is logged and missing from the result. Blocks.
        """
        if selection is None:
            selection = Selection(namespace=self.namespace, every_generation=True)
        chosen = [
            tier
            for tier, store in enumerate(self._stores)
            if store.is_ready or selection.namespace is None
        ]
        with self._quiet():
            with self._lock:
                self._epoch += 1
            erased = self._in_stores(lambda store: store.erase_matching(selection), ERASE_S, chosen)
            self._blocks.forget_copies()
        for tier in erased:
            store = self._stores[tier]
            for left in filter(None, store.unerased()):
                _log.warning("tier %s has not erased all: %s", store.name, left)
        return erased

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Return a context in which no record is written to any store.

        On entry it pauses demotion and waits for running writes. Loads do not promote records.
        """
        with self._demoter.paused(), self._executor.only_awaited():
            if not self._executor.settle_unawaited(ERASE_S):
                _log.warning(
                    "a tier that is being written to did not answer; it is erased around that"
                )
            yield

    def _in_stores(
        self,
        call: Callable[[Store], _T],
        timeout_s: float,
        tiers: Sequence[int] | None = None,
        *,
        also_stalled: bool = False,
    ) -> dict[int, _T]:
        """Run `call` on each store, in a thread of the store. Returns the results by tier index.

        Skips stalled stores, including those in which an earlier call of this method still hangs.
        With `also_stalled`, calls them, as soon as they take calls, but does not wait for them.
        Blocks for at most `timeout_s`. A store that is late or raises has no result.
        """
        calls: dict[int, Call[_T] | None] = {
            tier: self._callers[tier].submit(partial(call, self._stores[tier]))
            for tier in (range(len(self._stores)) if tiers is None else tiers)
            if also_stalled or not self._is_stalled(tier)
        }
        answers: dict[int, _T] = {}
        deadline_s = time.monotonic() + timeout_s
        for tier, one in calls.items():
            if one is None:  # closed, or the system has no thread left
                continue
            while not one.ended.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
                if self._is_stalled(tier):
                    break
                one.ended.wait(min(left_s, _LOOK_S))
            name = self._stores[tier].name
            if not one.ended.is_set():
                self._callers[tier].leave(one)
                _log.warning(
                    "tier %s has not answered and is not waited for any longer (%.0f s at most)",
                    name,
                    timeout_s,
                )
                continue
            try:
                answers[tier] = one.result()
            except Exception:
                _log.exception("tier %s failed against its contract", name)
        return answers

    def _is_stalled(self, tier: int) -> bool:
        """Return whether a call to the store hangs, of the executor or of `_in_stores`."""
        self._executor.look()
        return tier in self._executor.stuck_tiers or self._callers[tier].is_stuck

    # --- statistics and shutdown ---------------------------------------------------------------

    def _tiers_that_take(self) -> list[int]:
        """Return the tiers that accept demoted blocks now, nearest first."""
        stuck = set(self._executor.stuck_tiers)
        return [
            tier
            for tier, store in enumerate(self._stores)
            if store.takes_records
            and store.is_ready
            and tier not in stuck
            and self._costs.worth_writing(tier)
        ]

    def _nearest_capacity(self) -> int | None:
        """Return how many records the nearest tier can hold.

        None if there is no tier, if its store uses a file system or a server, or has no limit.
        """
        nearest = next(iter(self._stores), None)
        if nearest is None or nearest.asks_medium:
            return None
        limit_bytes = nearest.capacity().limit_bytes
        return None if limit_bytes is None else limit_bytes // self._staging.record_bytes

    @property
    def stuck_tiers(self) -> list[int]:
        """Indices of the tiers that are bypassed because a call to the store hangs."""
        return self._executor.stuck_tiers

    def load_s(self, tier: int) -> float | None:
        """Return the seconds to load a block from the tier; None before the first load."""
        return self._costs.load_s(tier)

    def waiting_bytes(self, tier: int) -> int:
        """Return the bytes of records that wait to be copied to this tier from a nearer one."""
        return self._behind.waiting(tier) * self._staging.record_bytes

    def block_counts(self) -> BlockCounts:
        """Return the counts of blocks since the tiers were opened."""
        pool = self._blocks.stats()
        with self._lock:
            return BlockCounts(
                matched=self._matched,
                unmatched=self._unmatched,
                loaded=self._loaded,
                missed=self._missed,
                **self._demoter.counts,
                demoted=pool["blocks_demoted"],
                dropped=pool["blocks_dropped"],
            )

    @property
    def stores(self) -> tuple[Store, ...]:
        """The stores, nearest first. The tiers own them; do not close them."""
        return self._stores

    @property
    def rules(self) -> Rules:
        """The rules for demotion."""
        return self._rules

    def attach(self, close: Callable[[], None]) -> None:
        """Register the `close` of an object that uses the tiers. It is called before they close."""
        self._users.append(close)

    def drain(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until no transfer is open and no copy to a farther tier is pending.

        Returns whether that was reached. Blocks for at most `timeout_s`.
        """
        until_s = time.monotonic() + timeout_s
        if not self._behind.drain(timeout_s):
            return False
        return self._executor.drain(max(0.0, until_s - time.monotonic()))

    def check_integrity(self) -> None:
        """Check the executor and every store. Raises `IntegrityError` for the first mismatch.

        Also raises it for a store that is stalled or takes longer than a minute, since that store
        was not checked. Demotion is paused during the check. Blocks.
        """
        with self._quiet():
            self._executor.check_integrity()
            problems = self._in_stores(_problem_of, ERASE_S)
        for tier, store in enumerate(self._stores):
            if tier not in problems:
                raise IntegrityError(
                    f"tier {store.name} does not answer, so it was not compared; ask again when it"
                    " does"
                )
            problem = problems[tier]
            if problem is not None:
                raise problem

    def close(self, timeout_s: float = CLOSE_S) -> list[str]:
        """Stop the threads and close the stores. Idempotent.

        Returns the names of the parts that hang and were abandoned. Pending copies to farther tiers
        are discarded; call `drain` first to wait for them. Waits at most `timeout_s` each for
        running copies to farther tiers, the demoter, the lookups and the stores. Call it before
        the pool is closed.
        """
        with self._lock:
            if self._is_closed:
                return []
            self._is_closed = True
        atexit.unregister(self._close_at_exit)
        left: list[str] = []

        def end(name: str, close: Callable[[float], bool]) -> None:
            if not close(timeout_s):
                left.append(name)

        with ExitStack() as closing:  # in reverse order; closes the others too if one raises
            closing.callback(lambda: left.extend(self._executor.close(timeout_s)))
            for caller in self._callers:
                closing.callback(caller.close, 0.0)
            closing.callback(self._lookup.close, timeout_s)
            closing.callback(end, "demotion", self._demoter.close)
            closing.callback(end, "copies to farther tiers", self._behind.close)
            for close in reversed(self._users):
                closing.callback(close)
        return left


def _problem_of(store: Store) -> KvelasticError | None:
    """Return the error that the store's integrity check raises, or None."""
    try:
        store.check_integrity()
    except KvelasticError as error:
        return error
    return None
