"""The native pool as an engine's scheduler uses it.

An engine's replacement of its free-block list calls this class, and keeps the engine's own data:
objects, hashes, trees. Each call moves blocks from one state to another::

              take                   give_back(free)
    free  -----------> in use  -------------------------> free
                        |   ^                               ^
    give_back(cached=)  |   |  touch                        |  drop, or evicted by the pool
                        v   |                               |
                       cached  -----------------------------'

A scheduler first looks (is the prefix cached? is there room?) and then takes. In a *session* no
other thread takes blocks in between. Outside a session the pool may evict cached blocks or move
their contents to other ids, also while the process sleeps. It queues these changes, and the engine
applies them in `on_changes` before it looks up anything::

    with blocks.session():                         # on_changes has received all changes
        found = ...
        if blocks.prepare(count) >= count:         # pages are mapped, and nothing is evicted
            blocks.touch(found)
            ids = blocks.take(count)
    step = blocks.step_begins()
    blocks.give_back(some, cached=others)          # stay mapped until the step has ended
    blocks.step_ends(step)

Only the scheduler's thread may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

from kvelastic.errors import IntegrityError
from kvelastic.pool.scheduling.steps import PinsOfSteps, StepsOnTheirWay

if TYPE_CHECKING:
    from kvelastic import _vmm

Changes: TypeAlias = Sequence[tuple[int, int]]
"""Cached blocks, in order, each with the id of its contents now; below 0: it was evicted."""

_EPOCH_WRAP = 1 << 32
"""The native pool's availability epoch is a 32-bit word that wraps."""


class SchedulerBlocks:
    """The blocks of one pool, for one scheduler."""

    def __init__(self, pool: _vmm.Pool) -> None:
        self.pool = pool
        """The native pool, for limits, sleep and statistics."""
        self.on_changes: Callable[[Changes], None] = lambda _: None
        """Applies the pool's own changes. It must not take blocks, but may give them back."""
        self.headroom = 0
        """Further blocks that `prepare` keeps free if possible."""
        self.used = 0
        """Used blocks: those of requests, and those being loaded for them."""
        self.fell_short = False
        """True if `prepare` found too little memory in the current or last session."""
        self._steps = StepsOnTheirWay()
        self._pins_of_steps = PinsOfSteps()
        self._pins_after_next_step = PinsOfSteps()
        self._reused_under = 0
        self._reported_busy: bool | None = None
        self._at_hand_when_short = 0

    # --- sessions -------------------------------------------------------------------------------

    def session(self) -> AbstractContextManager[None]:
        """Keep the pool unchanged while the engine looks up, checks and takes blocks. Can nest.

        Waits while the pool shrinks. Limits and reclaim requests wait until the session ends.
        """
        return self.pool.session(self._session_has_begun)

    def _session_has_begun(self) -> None:
        if self.pool.session_depth == 1:
            self.fell_short = False
        self.follow()

    def follow(self) -> None:
        """Pass the pool's changes since the last call to `on_changes`.

        Every session begins with it, and `take` ends with it. Within a session, call it after
        anything else that can evict: giving blocks back over the limit, or caching too many.
        """
        if self.pool.has_evicted:
            self.on_changes(self.pool.take_changes())

    # --- how much there is ----------------------------------------------------------------------

    def prepare(self, count: int) -> int:
        """Map memory for `count` blocks; return how many can be taken in this session.

        Blocks on the driver. If the engine could otherwise admit no request or had to preempt, it
        also waits for memory from other instances, up to `KVELASTIC_RECLAIM_WAIT`. If workers map,
        it waits up to `KVELASTIC_IPC_TIMEOUT`. Evicts nothing, so cached blocks just found stay.
        """
        pool = self.pool
        reusable = pool.reusable
        wanted = count + self.headroom - reusable
        if wanted <= 0:
            return count
        least = count - reusable
        mapped = pool.ensure(wanted, needed=least)
        if mapped >= wanted:
            return count
        if self.headroom and mapped < least:
            mapped = pool.ensure(least, needed=least)
        if mapped < least:
            self.fell_short = True
            self._at_hand_when_short = self.used + reusable + mapped
            return reusable + mapped
        return count

    @property
    def has_grown(self) -> bool:
        """True if there is memory for more blocks than when `prepare` last fell short."""
        return self.used + self.at_hand > self._at_hand_when_short

    @property
    def at_hand(self) -> int:
        """Blocks that can be taken now. Valid until the session ends or a block is taken."""
        return self.pool.available_mapped() + self.pool.reusable

    @property
    def reachable(self) -> int:
        """Blocks available now, including those whose pages must be mapped first."""
        return self.pool.available_size() + self.pool.reusable

    @property
    def under_limit(self) -> int:
        """All blocks under the current limit, including used ones."""
        return self.used + self.reachable

    @property
    def usage(self) -> float:
        """The fraction (0 to 1) of `under_limit` that is used."""
        return self.used / self.under_limit if self.used else 0.0

    # --- taking and giving back -----------------------------------------------------------------

    def take(self, count: int) -> list[int] | None:
        """Take blocks, evicting cached ones if needed; return None if there are too few.

        Within a session it succeeds if `prepare` or `at_hand` reported enough. The blocks may
        include some that a step in flight still uses, see `reused_under`.
        """
        pool = self.pool
        reusable = pool.reusable if self._pins_of_steps else 0
        ids = pool.alloc(count, reuse=True)
        if ids is None:
            return None
        if reusable and pool.reusable != reusable:
            self._reused_under = self._steps.newest
        self.used += count
        # A returned id may have been evicted just now: report its old contents first.
        if pool.has_evicted:
            self.on_changes(pool.take_changes())
        return ids

    def touch(self, ids: Sequence[int]) -> None:
        """Mark cached blocks as used. Raises `BlockError` with nothing changed."""
        self.pool.touch(ids)
        self.used += len(ids)

    def give_back(
        self, free: list[int], cached: list[int] | None = None, keys: bytes | None = None
    ) -> None:
        """Release used blocks that have no reference now; keep the contents of `cached`.

        Blocks that are cached first are evicted first, so pass ends of prompts first. `keys` are
        the keys of the cached blocks, 16 bytes each. Over the limit this unmaps pages and blocks.
        """
        cached = cached or []
        if newest := self._steps.newest:
            ticket = self.pool.pin(free + cached, kind="ordered")
            self._pins_of_steps.add(newest, ticket)
        self.used -= len(free) + len(cached)
        if free:
            self.pool.free(free)
        if cached:
            self.pool.cache(cached, keys)

    def drop(self, cached: list[int]) -> None:
        """Free cached blocks."""
        if cached:
            self.pool.free(cached)

    def clear(self) -> None:
        """Free every block; ids handed out before become invalid."""
        self.pool.clear()
        self.used = 0
        self.follow()

    # --- steps ----------------------------------------------------------------------------------

    def step_begins(self, *, works: bool = True) -> int:
        """Begin a scheduled step; return its number for `step_ends`. `works`: it has work.

        A block given back from now on stays mapped until the step has ended, because the step may
        access it. It may be taken again at once: work of later steps runs after this step.
        """
        return self._steps.begin(works=works)

    def step_works(self, step: int) -> None:
        """The newest step, which began without work, has work."""
        self._steps.works(step)

    def step_ends(self, step: int) -> None:
        """This step and all earlier ones have been executed."""
        self._steps.end(step)
        for pins in (self._pins_of_steps, self._pins_after_next_step):
            for ticket in pins.take_ended(self._steps.ended):
                self.pool.unpin(ticket)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the body as a step."""
        number = self.step_begins()
        try:
            yield
        finally:
            self.step_ends(number)

    @property
    def is_at_work(self) -> bool:
        """True if a step with work is in flight."""
        return self._steps.is_at_work

    def has_ended(self, step: int) -> bool:
        """Return True if this step and all earlier ones have been executed."""
        return self._steps.ended >= step

    @property
    def waits_for_steps(self) -> bool:
        """True if blocks that were given back wait for a step to end."""
        return len(self._pins_of_steps) > 0

    @property
    def reused_under(self) -> int:
        """The newest step in flight whose blocks were taken again; 0 if no such step exists.

        The step may still access them. Later steps run after it. Any other writer to newly taken
        blocks must wait until the step `has_ended`.
        """
        return 0 if self.has_ended(self._reused_under) else self._reused_under

    # --- readers outside of steps ---------------------------------------------------------------

    def pin(self, ids: Sequence[int]) -> int:
        """Keep these blocks mapped and in place until `unpin`, even if they are given back.

        Returns a ticket. A pinned block may be taken again; the caller must then wait for the
        reader. Raises `BlockError` for free blocks.
        """
        return self.pool.pin(ids, kind="fenced")

    def unpin(self, ticket: int) -> None:
        """End a pin; blocks without other uses become free or cached. Idempotent."""
        self.pool.unpin(ticket)

    def unpin_after_next_step(self, ticket: int) -> None:
        """Unpin once the next scheduled step has ended."""
        self._pins_after_next_step.add(self._steps.next, ticket)

    @property
    def held_back(self) -> set[int]:
        """Blocks that were given back while a step or a reader may still use them."""
        return set(self.pool.pinned())

    # --- what others may take -------------------------------------------------------------------

    def report_busy(self, busy: bool) -> None:
        """Report whether any request is unfinished. Call it on every change.

        If none is, other instances may take this instance's cache at once. An engine that never
        reports counts as busy until half a second after its last alloc or free.
        """
        if busy is not self._reported_busy:
            self._reported_busy = busy
            self.pool.report_busy(busy)

    # --- what comes -----------------------------------------------------------------------------

    @property
    def given_back(self) -> int:
        """The part of the pool's availability epoch that blocks given back here caused."""
        return self.pool.given_back_epoch

    @property
    def availability_epoch(self) -> int:
        """A number that changes when blocks become available from elsewhere.

        Blocks given back here do not count, since the engine knows of them (`given_back`).
        """
        return (self.pool.availability_epoch - self.pool.given_back_epoch) % _EPOCH_WRAP

    def wait_for_epoch(self, seen: int, timeout_s: float) -> bool:
        """Block until the availability epoch differs from `seen`, up to `timeout_s`.

        Returns whether it does. Read `seen` *before* looking for blocks, so that no block is
        missed that becomes available during the search.
        """
        raw = (seen + self.pool.given_back_epoch) % _EPOCH_WRAP
        return self.pool.wait_for_epoch(raw, timeout_s) != raw

    # --- what always holds ----------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Compare with the pool's own counts. Raises `IntegrityError`. Slow."""
        self.pool.check_integrity()
        used = self.pool.stats()["blocks_used"]
        if used != self.used:
            raise IntegrityError(f"{self.used} blocks are in use, in the native pool {used}")
