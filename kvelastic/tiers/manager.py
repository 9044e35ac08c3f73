"""Tiers of one pool: what is found in them, what is loaded from them, what leaves for them.

    tiers = open_tiers(pool, settings, namespace, staging)      # see `opening`
    with tiers.match(keys) as match:
        ids = blocks.alloc(match.count)
        load = tiers.load(match, ids)
    load.wait(1.0)                                       # load.failed: places to be computed
    tiers.close()

Nothing here raises for what a tier's medium does: what cannot be read is a miss, what cannot be
written was not stored, and both are counted. Any thread may call anything. `match`, `load` and the
properties do not wait for a medium, as long as the stores keep their word.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from kvelastic.errors import IntegrityError, InvalidArgumentError, KvelasticError
from kvelastic.tier_status import BlockCounts
from kvelastic.tiers.base import (
    KEY_BYTES,
    NO_KEY,
    Capacity,
    Selection,
    Store,
    StoreStatistics,
)
from kvelastic.tiers.costs import Costs
from kvelastic.tiers.demoter import Demoter, DemotionCounts
from kvelastic.tiers.executor import STUCK_S, Executor
from kvelastic.tiers.graph import NO_TIER, Graph, Kind
from kvelastic.tiers.lineage import Lineage
from kvelastic.tiers.lookup import Lookup
from kvelastic.tiers.match import Load, Match
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.plan import Segment, load_graph
from kvelastic.tiers.policy import Rules
from kvelastic.tiers.pool_side import Copies, LeavingBlocks, StagingMemory
from kvelastic.tiers.run import Priority, Run, Transfer
from kvelastic.tiers.statistics import TiersStatistics, TierStatistics
from kvelastic.tiers.write_behind import WriteBehind

_log = logging.getLogger("kvelastic")

CLOSE_S = 5.0
EXIT_S = 2.0
"""The same at the end of a process that has not closed its tiers."""
ERASE_S = 60.0
"""How long `erase` and `forget` wait for a store."""
LOAD_BATCH = 8
"""Blocks of one read at least: deep enough for a disk."""
LOAD_BATCH_BYTES = 8 << 20
"""Of one read, where blocks are small: each read and each copy has a price of its own."""
LOAD_BATCHES = 4
"""Of one load at least: while one is copied to the device the next is read."""

_LOOK_S = 0.25
"""How often it looks whether a tier that it waits for is stalled."""

_T = TypeVar("_T")


class NamedBlocks(Copies, LeavingBlocks, Protocol):
    """The native pool, as far as tiers use it."""

    def name_blocks(self, ids: Sequence[int], keys: bytes) -> None:
        """The keys of blocks in use."""

    def mark_clean(self, ids: Sequence[int], keys: bytes) -> int:
        """They have copies now, if they still have these keys."""

    def forget_copies(self) -> int:
        """No block has a copy any more."""

    def clean(self, timeout_s: float) -> int:
        """Have all copied that is cached under keys; answers how many blocks have no copy then."""

    def use_tiers(self, *, reclaim_wait_s: float, limit_wait_s: float, sleep_wait_s: float) -> None:
        """Evictions count as demoted or dropped, and shrinking waits for copies."""


class Observer(Protocol):
    """Who shows tiers to others, and ends before they do."""

    def close(self) -> None:
        """Ask nothing of the tiers any more. Repeatable."""


class Tiers:
    """See the module. `stores` are nearest first, and belong to it."""

    def __init__(
        self,
        blocks: NamedBlocks,
        staging: StagingMemory,
        namespace: Namespace,
        stores: Sequence[Store],
        rules: Rules | None = None,
        *,
        stuck_s: float = STUCK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Enters the namespace in every store and starts the threads.

        Raises `InvalidArgumentError` for a store of other records than staging's.
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
        """Guards the counts, the namespace and the open matches; no other lock is taken inside."""
        self._matched = self._unmatched = self._loaded = self._missed = 0
        deadlines = self._rules.deadlines
        blocks.use_tiers(
            reclaim_wait_s=deadlines.reclaim_s,
            limit_wait_s=deadlines.limit_s,
            sleep_wait_s=deadlines.sleep_s,
        )
        self._epoch = 0
        """Goes up when records are erased: what was read before is no copy after."""
        self._is_closed = False
        self._observers: list[Observer] = []
        self._late: dict[int, threading.Thread] = {}
        """By tier, the last call that was not waited for any longer."""
        for store in stores:
            store.enter(namespace)
        self._executor = Executor(
            blocks, staging, stores, stuck_s=stuck_s, clock=clock, measured=self._measure
        )
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
        # A process that forgets to close it ends with no thread inside a store or the pool.
        self._pid = os.getpid()
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        if self._pid == os.getpid():  # a forked child has none of the threads
            self.close(EXIT_S)

    # --- looking and loading -------------------------------------------------------------------

    @property
    def namespace(self) -> Namespace:
        """The one that keys are made for now."""
        with self._lock:
            return self._namespace

    def match(self, keys: bytes, *, chain_after: bytes = NO_KEY) -> Match:
        """Find and hold the leading keys that lie in tiers, each in the nearest that has it.

        The keys continue one another, and the first one continues `chain_after` (NO_KEY: it begins
        a prompt). Release the match when the step ends. A tier that hangs or is slower than
        computing is not asked.
        """
        count, rest = divmod(len(keys), KEY_BYTES)
        if rest:
            raise InvalidArgumentError(
                f"keys have {len(keys)} bytes, no multiple of {KEY_BYTES}; pass whole keys"
            )
        self._lineage.note(keys, chain_after)
        with self._lock:
            epoch = self._epoch
        held, leases = self._lookup.hold_leading(keys, self._may_ask)
        match = Match(keys, held, leases, chain_after, epoch)
        with self._lock:
            self._matched += match.count
            self._unmatched += count - match.count
        return match

    def _may_ask(self, tier: int) -> bool:
        return (
            self._stores[tier].is_ready
            and tier not in self._executor.stuck_tiers
            and self._costs.worth_asking(tier)
        )

    def load(self, match: Match, ids: Sequence[int]) -> Load:
        """Begin to load the first `len(ids)` keys of a match into these blocks, which are in use.

        What the match holds stays held until the load is done. The blocks are
        named by their keys, and those that were loaded count as clean under them. Of a match from
        before `erase` or `forget` nothing is loaded, though its leases may still keep it. Raises
        `InvalidArgumentError` for more blocks than the match has keys.
        """
        if len(ids) > match.count:
            raise InvalidArgumentError(
                f"{len(ids)} blocks were given for a match of {match.count}; give no more"
            )
        segments = [
            Segment(s.tier, s.first, min(s.count, len(ids) - s.first))
            for s in match.segments
            if s.first < len(ids)
        ]
        nearest_kept = self._tiers_that_take()[:1]
        graph = load_graph(
            segments,
            batch=self._load_batch(len(ids)),
            promote_to=nearest_kept[0] if nearest_kept else NO_TIER,
            copies=self._rules.copies,
        )
        if not self._is_current(match.epoch):
            # Loaded, it would also be put into a nearer tier once more, for others to find.
            graph = Graph((), len(ids))
        keys = match.keys[: len(ids) * KEY_BYTES]
        parents = [match.chain_after, *(_key(keys, at) for at in range(len(ids) - 1))]
        let_go = match.hold()
        try:
            # Now, while they are surely in use: what fails is computed, under the same key.
            self._blocks.name_blocks(ids, keys)
            run = self._executor.submit(
                Transfer(graph, keys, tuple(ids), parents[: len(ids)]), Priority.LOAD
            )
        except BaseException:
            let_go()
            raise

        def note(run: Run) -> None:
            try:
                self._note_load(run, match.epoch)
            finally:
                let_go()

        run.on_complete(note)
        if not self._is_current(match.epoch):  # erased in between, which did not see this run
            run.cancel()
        return Load(ids, run)

    def _load_batch(self, count: int) -> int:
        """Blocks of one read of a load of `count`; staging has room for four of them."""
        of_bytes = LOAD_BATCH_BYTES // self._staging.record_bytes
        batch = max(LOAD_BATCH, min(of_bytes, -(-count // LOAD_BATCHES)))
        return min(batch, max(1, self._staging.slots // 4))

    def _is_current(self, epoch: int) -> bool:
        """Whether nothing was erased since."""
        with self._lock:
            return epoch == self._epoch

    def _note_load(self, run: Run, epoch: int) -> None:
        loaded = [at for at, is_loaded in enumerate(run.loaded) if is_loaded]
        with self._lock:
            self._loaded += len(loaded)
            self._missed += len(run.loaded) - len(loaded)
        # Those that have another key by now, or none, are left alone.
        if loaded and self._is_current(epoch):
            transfer = run.transfer
            self._blocks.mark_clean([transfer.ids[at] for at in loaded], transfer.keys_of(loaded))

    def clean_all(self, timeout_s: float) -> int:
        """Copy whatever is cached under keys to tiers now; answers how many blocks have no copy.

        For an engine that is about to give its cache up by itself, as vLLM before it sleeps.
        Blocks, `timeout_s` and one copy at most.
        """
        return self._blocks.clean(timeout_s)

    def clean_before_exit(self, timeout_s: float) -> int:
        """As `clean_all`, also to farther tiers, which may be all that the next start finds.

        Warns of copies that those lack after `timeout_s`.
        """
        until_s = time.monotonic() + timeout_s
        left = self.clean_all(timeout_s)
        if not self.drain(max(0.0, until_s - time.monotonic())):
            _log.warning("Blocks not yet copied to the farther tiers are lost with this engine.")
        return left

    def computed(self, blocks: int, seconds: float) -> None:
        """The engine has computed so many blocks in so long: what a tier has to beat."""
        self._costs.computed(blocks, seconds)

    @property
    def compute_s(self) -> float | None:
        """What computing a block takes, seconds; None before the engine said."""
        return self._costs.compute_s

    def note_prompt(self, keys: bytes, *, chain_after: bytes = NO_KEY) -> None:
        """Keys that continue one another: those of a prompt that was not looked up here."""
        self._lineage.note(keys, chain_after)

    # --- forgetting ----------------------------------------------------------------------------

    def forget(self) -> Namespace:
        """End this generation: nothing stored so far is found any more. Answers the new namespace.

        For a reset of the prefix cache, and for weights or adapters that change in place. Keys are
        to be made for the answer from now on. What lies in this process's own memory is erased;
        what others share is displaced in time, or erased by `erase`, and a restart finds it again.
        Waits for a copy that runs.
        """
        with self._quiet():
            with self._lock:
                old = self._namespace
                # At random: another process that counts from the same start must not meet this.
                self._namespace = replace(old, generation=secrets.randbits(62))
                new = self._namespace
                self._epoch += 1
            # Also one that is stalled: it is entered when its disk returns.
            self._in_stores(lambda store: store.enter(new), ERASE_S, also_stalled=True)
            own = [tier for tier, store in enumerate(self._stores) if store.name == "host"]
            self._in_stores(
                lambda store: store.erase_matching(Selection(namespace=old, every_generation=True)),
                ERASE_S,
                own,
            )
            self._blocks.forget_copies()
        return new

    def erase(self, selection: Selection | None = None) -> dict[str, int]:
        """Forget records in every tier; answers how many, by tier.

        None: all of this namespace, in all of its generations.

        A tier that is stalled, or does not answer within a minute, is left out of the answer and
        logged. Blocks.
        """
        if selection is None:
            selection = Selection(namespace=self.namespace, every_generation=True)
        counts: dict[str, int] = {}
        for tier, count in self.erase_by_place(selection).items():
            name = self._stores[tier].name
            counts[name] = counts.get(name, 0) + count
        return counts

    def erase_by_place(self, selection: Selection) -> dict[int, int]:
        """The same, by the places of the tiers: of one kind there may be several.

        A tier that is not ready is left out, unless the selection is of all namespaces.
        """
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

    def _quiet(self) -> _Quiet:
        return _Quiet(self._demoter, self._executor)

    def _in_stores(
        self,
        call: Callable[[Store], _T],
        timeout_s: float,
        tiers: Sequence[int] | None = None,
        *,
        also_stalled: bool = False,
    ) -> dict[int, _T]:
        """Call something of each store, in a thread for each: one that hangs holds nobody up.

        A store that is stalled is left out, unless `also_stalled`, and is not waited for. So is one
        in which an earlier call of this kind still hangs: such threads do not pile up.
        """
        answers: dict[int, _T] = {}
        chosen = [
            tier
            for tier in (range(len(self._stores)) if tiers is None else tiers)
            if also_stalled or not self._is_stalled(tier)
        ]

        def work(tier: int) -> None:
            try:
                answers[tier] = call(self._stores[tier])
            except Exception:
                _log.exception("tier %s failed against its contract", self._stores[tier].name)

        threads = [
            threading.Thread(target=work, args=(tier,), name="kvelastic-ask", daemon=True)
            for tier in chosen
        ]
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.start()
        for tier, thread in zip(chosen, threads, strict=True):
            thread.join(0.0)
            while thread.is_alive() and (left_s := deadline_s - time.monotonic()) > 0:
                if self._is_stalled(tier):
                    break
                thread.join(min(left_s, _LOOK_S))
            if thread.is_alive():
                self._late[tier] = thread
                _log.warning(
                    "tier %s has not answered and is not waited for any longer (%.0f s at most)",
                    self._stores[tier].name,
                    timeout_s,
                )
        return dict(answers)

    def _is_stalled(self, tier: int) -> bool:
        """Whether a call to the store hangs: one of the executor's, or an earlier one of these."""
        self._executor.look()
        late = self._late.get(tier)
        return tier in self._executor.stuck_tiers or (late is not None and late.is_alive())

    # --- the rest ------------------------------------------------------------------------------

    def _tiers_that_take(self) -> list[int]:
        """Those that demotion writes to now."""
        stuck = set(self._executor.stuck_tiers)
        return [
            tier
            for tier, store in enumerate(self._stores)
            if store.is_ready and tier not in stuck and self._costs.worth_asking(tier)
        ]

    def _nearest_capacity(self) -> int | None:
        """How many records the nearest tier can hold; None: others decide."""
        nearest = next(iter(self._stores), None)
        if nearest is None or nearest.asks_medium:
            return None
        limit_bytes = nearest.capacity().limit_bytes
        return None if limit_bytes is None else limit_bytes // self._staging.record_bytes

    def _measure(self, kind: Kind, tier: int, blocks: int, seconds: float) -> None:
        if kind is Kind.GET:
            self._costs.loaded(tier, blocks, seconds)

    def statistics(self) -> TiersStatistics:
        """What was done, and what lies where. Waits a second at most for a store that hangs."""
        return self.statistics_with(
            self._in_stores(lambda store: store.capacity(), 1.0, also_stalled=True),
            self._in_stores(lambda store: store.statistics(), 1.0, also_stalled=True),
        )

    def statistics_with(
        self, capacities: Mapping[int, Capacity], figures: Mapping[int, StoreStatistics]
    ) -> TiersStatistics:
        """The same with what stores have said, by their places. Asks none, and does not wait."""
        stuck = set(self._executor.stuck_tiers)
        pool = self._blocks.stats()
        counts: DemotionCounts = self._demoter.counts
        with self._lock:
            return TiersStatistics(
                tiers=tuple(
                    TierStatistics(
                        name=store.name,
                        capacity=capacities.get(tier),
                        store=figures.get(tier),
                        load_s=self._costs.load_s(tier),
                        is_stuck=tier in stuck,
                        waiting_bytes=self._behind.waiting(tier) * self._staging.record_bytes,
                    )
                    for tier, store in enumerate(self._stores)
                ),
                blocks=BlockCounts(
                    matched=self._matched,
                    unmatched=self._unmatched,
                    loaded=self._loaded,
                    missed=self._missed,
                    served=counts.served,
                    ahead=counts.ahead,
                    refused=counts.refused,
                    late=counts.late,
                    lost=counts.lost,
                    demoted=pool["blocks_demoted"],
                    dropped=pool["blocks_dropped"],
                ),
            )

    @property
    def stores(self) -> tuple[Store, ...]:
        """Nearest first. They belong to this: not to be closed."""
        return self._stores

    @property
    def rules(self) -> Rules:
        """What it goes by."""
        return self._rules

    def attach(self, observer: Observer) -> None:
        """It is closed before the tiers are."""
        self._observers.append(observer)

    def drain(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until nothing is on its way, also to farther tiers; return whether nothing is.

        Blocks `timeout_s` at most.
        """
        until_s = time.monotonic() + timeout_s
        if not self._behind.drain(timeout_s):
            return False
        return self._executor.drain(max(0.0, until_s - time.monotonic()))

    def check_integrity(self) -> None:
        """Every part's own check, and every store's. Raises `IntegrityError`, also for a store that
        is stalled or does not answer within a minute: it was not compared.

        Nothing is demoted meanwhile. Blocks.
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
        """End the threads and close the stores. Answers what hangs and is left behind. Repeatable.

        What waits for a farther tier is given up; `drain` waits for it. Waits `timeout_s` for each
        of these copies, the demoter and the stores at most. Call it before the pool is closed.
        """
        with self._lock:
            if self._is_closed:
                return []
            self._is_closed = True
        atexit.unregister(self._close_at_exit)
        for observer in self._observers:
            observer.close()
        left = [] if self._behind.close(timeout_s) else ["copies to farther tiers"]
        left += [] if self._demoter.close(timeout_s) else ["demotion"]
        self._lookup.close(timeout_s)
        return left + self._executor.close(timeout_s)


class _Quiet:
    """Nothing is being put anywhere inside."""

    def __init__(self, demoter: Demoter, executor: Executor) -> None:
        self._paused = demoter.paused()
        self._executor = executor

    def __enter__(self) -> None:
        self._paused.__enter__()
        if not self._executor.settle_unawaited(ERASE_S):
            _log.warning("a tier that is being written to did not answer; it is erased around that")

    def __exit__(self, *exc: object) -> None:
        self._paused.__exit__(None, None, None)


def _problem_of(store: Store) -> KvelasticError | None:
    """What its own check finds."""
    try:
        store.check_integrity()
    except KvelasticError as error:
        return error
    return None


def _key(keys: bytes, at: int) -> bytes:
    return keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
