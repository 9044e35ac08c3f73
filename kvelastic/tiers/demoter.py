"""The thread that cleans dirty blocks: when a shrinking pool requests it, and ahead of need.

    demoter = Demoter(pool, executor, rules, behind, record_bytes=..., tiers=lambda: [0, 1])
    demoter.start()
    with demoter.paused(): ...
    demoter.close(timeout_s=1)

The thread runs one writeback at a time. `begin_writeback` selects blocks. A transfer copies them to
staging and puts each into the first tier that accepts it. `end_writeback` reports which were
stored.
A writeback is small, so that most of a 20 ms deadline yields clean blocks. The pool's session is
not held during the transfer. At a deadline the thread cancels the transfer. It then waits for a
running copy of the pool, but not for a store. `WriteBehind` copies blocks from the tier that has
them to the farther ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvelastic import _vmm
from kvelastic.errors import KvelasticError
from kvelastic.tiers.base import each_key
from kvelastic.tiers.costs import averaged
from kvelastic.tiers.executor import Executor
from kvelastic.tiers.graph import demote_graph
from kvelastic.tiers.lineage import in_order
from kvelastic.tiers.policy import (
    Copies,
    Occupancy,
    Rules,
    batch_blocks,
    blocks_to_clean,
    refilled,
)
from kvelastic.tiers.transfer_run import Priority, Run, Transfer
from kvelastic.tiers.write_behind import WriteBehind

_log = logging.getLogger("kvelastic")

AHEAD_S = 0.1
"""Time budget that sizes one writeback ahead of need."""
MOST_AHEAD_S = 1.0
"""Timeout of one writeback ahead of need, since a tier may hang."""
REFUSED_S = 1.0
"""First backoff of cleaning ahead after a writeback that cleaned no block. Doubles each time."""
MOST_REFUSED_S = 30.0
"""Maximum backoff."""
_BATCHES = 4
"""Batches of one writeback, so that copies overlap writes."""


class Demoter:
    """The demotion thread of one pool. Call `start` if any tier takes records."""

    def __init__(
        self,
        blocks: _vmm.Pool,
        executor: Executor,
        rules: Rules,
        behind: WriteBehind,
        *,
        record_bytes: int,
        tiers: Callable[[], Sequence[int]],
        parents: Callable[[bytes], list[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tiers` returns the tiers that accept blocks now, nearest first.

        `parents` returns, for each of the given keys, the key that it continues.
        """
        self._blocks = blocks
        self._executor = executor
        self._rules = rules
        self._behind = behind
        self._record_bytes = record_bytes
        self._tiers = tiers
        self._parents = parents
        self._clock = clock
        self.counts = dict.fromkeys(("served", "ahead", "refused", "late", "lost"), 0)
        """Counts of blocks, described in `BlockCounts`."""
        self._bytes_per_s: float | None = None
        self._budget_bytes = float(self._burst_bytes)
        self._budget_at_s = clock()
        self._activity = -1
        self._active_at_s = clock()
        self._refused_until_s = 0.0
        self._refused_s = REFUSED_S
        self._working = threading.Lock()
        self._state = threading.Lock()
        """Guards `_run` and `_pauses`. Taken inside `_working`."""
        self._run: Run | None = None
        self._pauses = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvelastic-demote", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()
        # From here on the pool waits for the thread before it drops blocks, even if it begins late.
        self._blocks.next_demotion(0.0)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel the current writeback and stop the thread. Idempotent.

        Waits at most `timeout_s`. Returns whether the thread has ended.
        """
        self._is_closing.set()
        self._cancel_current()
        self._blocks.stop_demotions()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which no block is demoted.

        On entry it cancels the current writeback and copies to farther tiers. Blocks while a copy
        of the pool is running.
        """
        with self._state:
            self._pauses += 1
        try:
            self._cancel_current()
            # The order matters: with `_working` held, the thread may wait for copies to farther
            # tiers.
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
            # A last `next_demotion`, begun before `close`, may have told the pool that a thread
            # serves demotions.
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
            # The pool has failed or is closed, but the owner may not have noticed yet.
            _log.warning("blocks could not be demoted: %s: %s", error.code, error)
            self._is_closing.wait(REFUSED_S)
        except Exception:
            # Keep the thread alive: without it, each shrink would wait in vain.
            _log.exception("blocks could not be demoted; it is tried again")
            self._is_closing.wait(REFUSED_S)

    def _serve(self, demotion: _vmm.Demotion) -> None:
        """Clean the requested number of blocks.

        Stops at the deadline, or when a writeback finds no dirty blocks or cleans none.
        """
        deadline_s = self._clock() + demotion.seconds_left
        share_s = min(demotion.seconds_left, self._rules.deadline_s(demotion.reason))
        left = demotion.blocks
        while left > 0 and self._clock() < deadline_s and not self._must_stop():
            if demotion.reason == "sleep":
                # A restart may find only the farther tiers. Wait, so that the nearest tier does
                # not evict blocks before the farther ones have them.
                self._behind.wait_for_room(deadline_s - self._clock())
            begun, cleaned = self._clean(left, share_s, Priority.RECLAIM, deadline_s)
            self.counts["served"] += cleaned
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
            self._rules,
            Occupancy(
                used=stats["blocks_used"],
                cached=stats["blocks_cached"],
                clean=stats["blocks_clean"],
                available=stats["blocks_available"],
                max_cached=most if (most := self._blocks.max_cached_blocks) >= 0 else None,
                oldest_copyable_s=self._blocks.oldest_copyable_s,
            ),
            idle_s=now_s - self._active_at_s,
            affordable=self._affordable(now_s),
        )
        while wanted > 0 and not self._must_stop() and not self._behind.is_full:
            # Bounded, because the thread serves no shrinking pool during this writeback.
            until_s = self._clock() + MOST_AHEAD_S
            begun, cleaned = self._clean(wanted, AHEAD_S, Priority.BACKGROUND, until_s)
            self.counts["ahead"] += cleaned
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
        """Run one writeback of at most `most` blocks. Blocks until `deadline_s` plus one copy.

        Returns how many blocks were begun and how many are now clean.
        """
        tiers = self._tiers()
        slots = self._executor.slots.count
        size = batch_blocks(self._record_bytes, self._bytes_per_s, deadline_s=share_s, slots=slots)
        batch = self._blocks.begin_writeback(min(most, size))
        ids, ticket = batch.ids, batch.ticket
        copied = [False] * len(ids)
        if not ids or not tiers:
            # Nothing to copy, or no tier accepts blocks. End the writeback without copies, so that
            # shrinking does not wait for them.
            self._blocks.end_writeback(ticket, copied)
            self.counts["refused"] += len(ids)
            return len(ids), 0
        began_s = self._clock()
        try:
            try:
                order, run = self._submit(ids, batch.keys, ticket, tiers, priority)
                if not run.wait(max(0.0, deadline_s - self._clock())):
                    run.cancel()
                    run.wait()
                for place, stored in zip(order, run.stored, strict=True):
                    copied[place] = bool(stored)
                if self._rules.copies is Copies.ALL:
                    # Enqueue before shrinking continues: the engine may be about to exit.
                    transfer = run.transfer
                    own = [transfer.key(item) for item in range(len(ids))]
                    self._behind.add(own, transfer.parents, run.stored, tiers)
            finally:
                clean = self._blocks.end_writeback(ticket, copied)
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
        """Submit the transfer of one writeback.

        Returns the index into `ids` of each item, and the run.
        """
        own = each_key(keys)
        parents = self._parents(keys)
        order = in_order(own, parents)

        def confirm() -> list[bool]:
            stood_still = self._blocks.still_unchanged(ticket)
            return [stood_still[place] for place in order]

        batch = -(-len(ids) // _BATCHES)
        transfer = Transfer(
            demote_graph(len(ids), tiers=tiers, batch=batch),
            b"".join(own[place] for place in order),
            [ids[place] for place in order],
            parents=[parents[place] for place in order],
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
            self.counts["late"] += len(copied) - taken
        else:
            self.counts["refused"] += len(copied) - taken
        self.counts["lost"] += taken - clean

    # --- budget --------------------------------------------------------------------------------

    @property
    def _burst_bytes(self) -> int:
        """One second of the write budget, but at least one record."""
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
