"""The thread that makes dirty blocks clean: when shrinking asks for it, and ahead of need.

    demoter = Demoter(pool, executor, rules, behind, record_bytes=..., tiers=lambda: [0, 1])
    with demoter.paused(): ...
    demoter.close(timeout_s=1)

One leaving after another: `begin_leaving`, a graph that copies to staging and puts into the first
tier that takes each block, `end_leaving` with what was taken. A leaving is small, so that much of a
deadline of 20 ms becomes clean blocks and little is caught half way. The pool's session is not held
meanwhile. At a deadline the graph is cancelled; a copy of the pool is waited for, a store is not.
Farther tiers are given copies by `WriteBehind`, from the tier that has a block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvelastic.errors import KvelasticError
from kvelastic.tiers.base import KEY_BYTES, NO_KEY
from kvelastic.tiers.executor import Executor
from kvelastic.tiers.lineage import in_order
from kvelastic.tiers.plan import demote_graph
from kvelastic.tiers.policy import (
    Copies,
    Occupancy,
    Rules,
    averaged,
    batch_blocks,
    blocks_to_clean,
    refilled,
)
from kvelastic.tiers.pool_side import Demotion, LeavingBlocks
from kvelastic.tiers.run import Priority, Run, Transfer
from kvelastic.tiers.write_behind import WriteBehind

_log = logging.getLogger("kvelastic")

AHEAD_S = 0.1
"""How long one leaving takes at most where nobody waits."""
MOST_AHEAD_S = 1.0
"""It is cancelled then: a tier may hang."""
REFUSED_S = 1.0
"""After every tier has refused, nothing is cleaned ahead for so long; doubled each time."""
MOST_REFUSED_S = 30.0
_BATCHES = 4
"""Of a leaving: while one is put the next is copied."""


@dataclass
class DemotionCounts:
    """What the demoter has done. Counts are of blocks."""

    served: int = 0
    """Cleaned because shrinking waited for them."""
    ahead: int = 0
    """Cleaned though nobody waited."""
    refused: int = 0
    """Copied, and taken by no tier."""
    late: int = 0
    """Begun, and cancelled at a deadline."""
    lost: int = 0
    """Used, evicted or renamed while they were copied."""


class Demoter:
    """See the module. Starts its thread at once."""

    def __init__(
        self,
        blocks: LeavingBlocks,
        executor: Executor,
        rules: Rules,
        behind: WriteBehind,
        *,
        record_bytes: int,
        tiers: Callable[[], Sequence[int]],
        parents: Callable[[bytes], list[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tiers` says which tiers take blocks now, nearest first; `parents` which key each key of
        those given continues.
        """
        self._blocks = blocks
        self._executor = executor
        self._rules = rules
        self._behind = behind
        self._record_bytes = record_bytes
        self._tiers = tiers
        self._parents = parents
        self._clock = clock
        self.counts = DemotionCounts()
        self._bytes_per_s: float | None = None
        self._budget_bytes = float(self._burst_bytes)
        self._budget_at_s = clock()
        self._activity = -1
        self._active_at_s = clock()
        self._refused_until_s = 0.0
        self._refused_s = REFUSED_S
        self._working = threading.Lock()
        self._state = threading.Lock()
        """Guards the two below; taken inside `_working`."""
        self._run: Run | None = None
        self._pauses = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvelastic-demote", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the thread; what is on its way is cancelled. Answers whether it ended. Repeatable."""
        self._is_closing.set()
        self._cancel_current()
        self._blocks.stop_demotions()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is demoted inside; what is on its way is cancelled first. Waits for a copy."""
        with self._state:
            self._pauses += 1
        try:
            self._cancel_current()
            # In this order: a turn of the thread may wait for copies to farther tiers.
            with self._behind.paused(), self._working:
                yield
        finally:
            with self._state:
                self._pauses -= 1

    def _cancel_current(self) -> None:
        with self._state:
            run = self._run
        if run is not None:
            run.cancel()

    # --- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._turn()
        finally:
            # A last look for a want, begun before `close`, says that there is a thread to wait for.
            self._blocks.stop_demotions()

    def _turn(self) -> None:
        try:
            demotion = self._blocks.next_demotion(self._rules.tick_s)
            self._executor.look()
            with self._working:
                if demotion is not None:
                    self._serve(demotion)
                else:
                    self._clean_ahead()
        except KvelasticError as error:
            # A pool that has failed or is closed: there is nothing to demote any more, but
            # whoever made this may not have noticed yet.
            _log.warning("blocks could not be demoted: %s: %s", error.code, error)
            self._is_closing.wait(REFUSED_S)
        except Exception:
            # Without this thread whoever shrinks would wait for nothing, each time.
            _log.exception("blocks could not be demoted; it is tried again")
            self._is_closing.wait(REFUSED_S)

    def _serve(self, demotion: Demotion) -> None:
        """Until as many are clean as are wanted, nothing is left, or time is up."""
        deadline_s = self._clock() + demotion.seconds_left
        share_s = min(demotion.seconds_left, self._rules.deadlines.of(demotion.reason))
        left = demotion.blocks
        while left > 0 and self._clock() < deadline_s and not self._must_stop():
            if demotion.reason == "sleep":
                # The farther tiers may be all that a restart finds: what the nearest one would
                # displace before they have it is worth waiting for.
                self._behind.wait_for_room(deadline_s - self._clock())
            begun, cleaned = self._clean(left, share_s, Priority.RECLAIM, deadline_s)
            self.counts.served += cleaned
            left -= begun
            if begun == 0 or cleaned == 0:
                break

    def _clean_ahead(self) -> None:
        stats = self._blocks.stats()
        now_s = self._clock()
        activity = stats["allocs"] + stats["frees"]
        if activity != self._activity:
            self._activity, self._active_at_s = activity, now_s
        if now_s < self._refused_until_s or self._must_stop():
            return
        wanted = blocks_to_clean(
            self._rules.policy,
            Occupancy(
                used=stats["blocks_used"],
                cached=stats["blocks_cached"],
                clean=stats["blocks_clean"],
                available=stats["blocks_available"],
                max_cached=most if (most := self._blocks.max_cached_blocks) >= 0 else None,
                oldest_copyable_s=self._blocks.oldest_copyable_s,
            ),
            watermark=self._rules.watermark,
            idle_s=now_s - self._active_at_s,
            idle_after_s=self._rules.idle_after_s,
            cache_idle_s=self._rules.cache_idle_s,
            affordable=self._affordable(now_s),
        )
        while wanted > 0 and not self._must_stop() and not self._behind.is_full:
            # Bounded, because nobody who shrinks is served meanwhile.
            until_s = self._clock() + MOST_AHEAD_S
            begun, cleaned = self._clean(wanted, AHEAD_S, Priority.BACKGROUND, until_s)
            self.counts.ahead += cleaned
            self._budget_bytes -= begun * self._record_bytes
            wanted -= begun
            if begun == 0:
                break
            if cleaned == 0:
                self._refused_until_s = self._clock() + self._refused_s
                self._refused_s = min(2 * self._refused_s, MOST_REFUSED_S)
                break
            self._refused_s = REFUSED_S
            demotion = self._blocks.next_demotion(0.0)
            if demotion is not None:
                self._serve(demotion)

    def _clean(
        self, most: int, share_s: float, priority: Priority, deadline_s: float
    ) -> tuple[int, int]:
        """One leaving of `most` blocks at most. Returns how many were begun, and how many are
        clean.
        """
        tiers = self._tiers()
        slots = self._executor.slots.count
        size = batch_blocks(self._record_bytes, self._bytes_per_s, deadline_s=share_s, slots=slots)
        leaving = self._blocks.begin_leaving(min(most, size))
        ids, ticket = leaving.ids, leaving.ticket
        copied = [False] * len(ids)
        if not ids or not tiers:
            # Said with blocks and no copy of any, so that nobody waits for what no tier takes.
            self._blocks.end_leaving(ticket, copied)
            self.counts.refused += len(ids)
            return len(ids), 0
        began_s = self._clock()
        try:
            try:
                order, run = self._submit(ids, leaving.keys, ticket, tiers, priority)
                if not run.wait(max(0.0, deadline_s - self._clock())):
                    run.cancel()
                    run.wait()
                for place, stored in zip(order, run.stored, strict=True):
                    copied[place] = bool(stored)
                if self._rules.copies is Copies.ALL:
                    # Before shrinking goes on: it may be an engine that ends.
                    transfer = run.transfer
                    own = [transfer.key(item) for item in range(len(ids))]
                    self._behind.add(own, transfer.parents, run.stored, tiers)
            finally:
                clean = self._blocks.end_leaving(ticket, copied)
            self._count(run, copied, clean)
            took_s = self._clock() - began_s
            if all(copied) and took_s > 0:
                rate = len(ids) * self._record_bytes / took_s
                self._bytes_per_s = averaged(self._bytes_per_s, rate)
        finally:
            with self._state:
                self._run = None
        return len(ids), clean

    def _submit(
        self, ids: list[int], keys: bytes, ticket: int, tiers: Sequence[int], priority: Priority
    ) -> tuple[list[int], Run]:
        """Answers the run, and which block of the leaving each item of it is."""
        own = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        parents = self._parents(keys) if self._parents is not None else [NO_KEY] * len(ids)
        order = in_order(own, parents)

        def confirm() -> list[bool]:
            stood_still = self._blocks.still_leaving(ticket)
            return [stood_still[place] for place in order]

        batch = -(-len(ids) // _BATCHES)
        transfer = Transfer(
            demote_graph(len(ids), tiers=tiers, batch=batch),
            b"".join(own[place] for place in order),
            [ids[place] for place in order],
            parents=None if self._parents is None else [parents[place] for place in order],
            confirm=confirm,
        )
        run = self._executor.submit(transfer, priority)
        with self._state:
            self._run = run
            must_stop = self._pauses > 0 or self._is_closing.is_set()
        if must_stop:
            run.cancel()
        return order, run

    def _count(self, run: Run, copied: Sequence[bool], clean: int) -> None:
        taken = sum(copied)
        if run.is_cancelled:
            self.counts.late += len(copied) - taken
        else:
            self.counts.refused += len(copied) - taken
        self.counts.lost += taken - clean

    # --- budget --------------------------------------------------------------------------------

    @property
    def _burst_bytes(self) -> int:
        """One second of the budget, and never less than a record: else nothing could be written."""
        return max(self._rules.write_bytes_per_s or 0, self._record_bytes)

    def _affordable(self, now_s: float) -> int:
        rate = self._rules.write_bytes_per_s
        if rate is None:
            return 1 << 62
        elapsed_s, self._budget_at_s = now_s - self._budget_at_s, now_s
        self._budget_bytes = refilled(
            self._budget_bytes, elapsed_s, rate_bytes_per_s=rate, burst_bytes=self._burst_bytes
        )
        return max(0, int(self._budget_bytes // self._record_bytes))

    def _must_stop(self) -> bool:
        with self._state:
            return self._pauses > 0 or self._is_closing.is_set()
