"""The native pool as one engine's scheduler uses it.

What took the place of an engine's list of free blocks calls this, and keeps what is that engine's
alone: its objects, hashes, trees. Each call moves blocks from one state to another::

              take                   give_back(free)
    free  -----------> in use  -------------------------> free
                        |   ^                               ^
    give_back(cached=)  |   |  touch                        |  drop, or evicted by the pool
                        v   |                               |
                       cached  -----------------------------'

A scheduler looks first (which prefix is cached? is there room?) and takes then. In a *session*
nobody else takes blocks away in between. Outside of one the pool may evict cached blocks, or move
their contents to other ids, also while the process sleeps; it queues what it did. The engine
follows, in `on_changes`, before it looks anything up::

    with blocks.session():                         # on_changes has been told of everything
        found = ...
        if blocks.prepare(count) >= count:         # pages are mapped, and nothing is evicted
            blocks.touch(found)
            ids = blocks.take(count)
    step = blocks.step_begins()
    blocks.give_back(some, cached=others)          # their memory stays until the step has ended
    blocks.step_ends(step)

All calls come from the thread of the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

from kvelastic.errors import IntegrityError
from kvelastic.scheduling.steps import PinsOfSteps, StepsOnTheirWay

if TYPE_CHECKING:
    from kvelastic import _vmm

Changes: TypeAlias = Sequence[tuple[int, int]]
"""Cached blocks, in order, and where the contents of each are now; below 0: it was evicted."""

_ARRIVALS_WRAP = 1 << 32
"""The native pool's count of arrivals is a word that wraps."""


class SchedulerBlocks:
    """See the module."""

    def __init__(self, pool: _vmm.Pool) -> None:
        self.pool = pool
        """The native pool, for what is neither taken nor given back: limits, sleep, figures."""
        self.on_changes: Callable[[Changes], None] = lambda _: None
        """Follows what the pool did by itself. Must not take blocks; may give back."""
        self.headroom = 0
        """Blocks that `prepare` leaves free besides, where they can be had."""
        self.used = 0
        """Blocks in use: what requests have, and what is loaded for them."""
        self.fell_short = False
        """Whether, in the present session or the last, `prepare` could not have what it was asked
        for."""
        self._depth = 0
        self._steps = StepsOnTheirWay()
        self._pins_of_steps = PinsOfSteps()
        self._pins_after_next_step = PinsOfSteps()
        self._reused_under = 0
        self._reported_busy: bool | None = None
        self._at_hand_when_short = 0

    # --- sessions -------------------------------------------------------------------------------

    def session(self) -> AbstractContextManager[None]:
        """Hold the pool still while the engine looks up, checks and takes blocks. May nest.

        Waits while the pool shrinks; limits and what others ask wait until it ends.
        """
        return self

    def __enter__(self) -> None:
        self.pool.enter()
        self._depth += 1
        if self._depth == 1:
            self.fell_short = False
        try:
            self.follow()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self.pool.exit()

    def follow(self) -> None:
        """Tell `on_changes` what the pool did since the last time.

        Sessions begin so, and `take` ends so. In a session it is called after whatever else makes
        the pool evict: blocks given back over the limit, or cached beyond what is allowed.
        """
        if self.pool.has_evicted:
            self.on_changes(self.pool.take_changes())

    # --- how much there is ----------------------------------------------------------------------

    def prepare(self, count: int) -> int:
        """Have memory mapped for `count` blocks; how many of them can be taken in this session.

        Waits for the driver; where the engine would have to preempt or to admit nobody otherwise,
        also for memory that other instances were asked for, as long as `KVELASTIC_RECLAIM_WAIT`
        says; where workers map, as long as `KVELASTIC_IPC_TIMEOUT` at most. Evicts nothing, so
        cached blocks that were just found stay.
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
        """Whether there is memory for more blocks than when `prepare` last fell short."""
        return self.used + self.at_hand > self._at_hand_when_short

    @property
    def at_hand(self) -> int:
        """How many can be taken now; binding until the session ends, or a block is taken."""
        return self.pool.available_mapped() + self.pool.reusable

    @property
    def reachable(self) -> int:
        """How many could be had now, by mapping pages too; says nothing of the future."""
        return self.pool.available_size() + self.pool.reusable

    @property
    def under_limit(self) -> int:
        """How many there are under the present limit, those in use included."""
        return self.used + self.reachable

    @property
    def usage(self) -> float:
        """The part (0 to 1) of these that is in use."""
        return self.used / self.under_limit if self.used else 0.0

    # --- taking and giving back -----------------------------------------------------------------

    def take(self, count: int) -> list[int] | None:
        """Take blocks, evicting cached ones where that is needed; None: there are too few.

        In a session not after `prepare` or `at_hand` said that there are enough. Blocks that were
        given back under a step on its way are among them, see `reused_under`.
        """
        pool = self.pool
        reusable = pool.reusable if self._pins_of_steps else 0
        ids = pool.alloc(count, reuse=True)
        if ids is None:
            return None
        if reusable and pool.reusable != reusable:
            self._reused_under = self._steps.newest
        self.used += count
        # An id may have been evicted just now to be handed out again: its old contents go first.
        if pool.has_evicted:
            self.on_changes(pool.take_changes())
        return ids

    def touch(self, ids: Sequence[int]) -> None:
        """Cached blocks are in use from now on. Raises `BlockError` with nothing changed."""
        self.pool.touch(ids)
        self.used += len(ids)

    def give_back(
        self, free: list[int], cached: list[int] | None = None, keys: bytes | None = None
    ) -> None:
        """Blocks in use that nobody refers to any more, those in `cached` worth keeping.

        The first that is cached is the first to be evicted: ends of prompts come first. `keys` are
        those of the cached blocks, 16 bytes each. Over the limit this unmaps pages, which blocks.
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
        """Cached blocks are free from now on."""
        if cached:
            self.pool.free(cached)

    def clear(self) -> None:
        """Every block is free; ids handed out before are void."""
        self.pool.clear()
        self.used = 0
        self.follow()

    # --- steps ----------------------------------------------------------------------------------

    def step_begins(self, *, works: bool = True) -> int:
        """A step was scheduled; returns its number, for `step_ends`. Not all have work to do.

        What is given back from now on keeps its memory until the step has ended, for it may read
        and write it. It may be taken anew at once: later work comes after the step's by itself.
        """
        return self._steps.begin(works=works)

    def step_ends(self, step: int) -> None:
        """This step has been carried out, and all before it."""
        self._steps.end(step)
        for pins in (self._pins_of_steps, self._pins_after_next_step):
            for ticket in pins.take_ended(self._steps.ended):
                self.pool.unpin(ticket)

    @contextmanager
    def step(self) -> Iterator[None]:
        """The body is a step."""
        number = self.step_begins()
        try:
            yield
        finally:
            self.step_ends(number)

    @property
    def is_at_work(self) -> bool:
        """Whether a step that has work to do is on its way."""
        return self._steps.is_at_work

    def has_ended(self, step: int) -> bool:
        """Whether this step has been carried out, and all before it."""
        return self._steps.ended >= step

    @property
    def waits_for_steps(self) -> bool:
        """Whether blocks that were given back wait for a step to end."""
        return len(self._pins_of_steps) > 0

    @property
    def reused_under(self) -> int:
        """The newest step on its way under which blocks were handed out again; 0: there is none.

        It may still read and write them. Work of later steps comes after its own by itself; whoever
        else writes to blocks that were just taken waits until it `has_ended`.
        """
        return 0 if self.has_ended(self._reused_under) else self._reused_under

    # --- readers outside of steps ---------------------------------------------------------------

    def pin(self, ids: Sequence[int]) -> int:
        """Keep these blocks' memory where it is until `unpin`, whoever gives them back meanwhile.

        Returns a ticket. They may be taken anew all the same, as under a step: who lets that happen
        waits for the reader. Free blocks cannot be pinned: raises `BlockError`.
        """
        return self.pool.pin(ids, kind="fenced")

    def unpin(self, ticket: int) -> None:
        """End a pin; blocks that nobody else needs are free, or cached, now. Repeatable."""
        self.pool.unpin(ticket)

    def unpin_after_next_step(self, ticket: int) -> None:
        """The same once the step that is scheduled next has ended."""
        self._pins_after_next_step.add(self._steps.next, ticket)

    @property
    def held_back(self) -> set[int]:
        """The blocks that were given back, and that a step or a reader may still use."""
        return set(self.pool.pinned())

    # --- what others may take -------------------------------------------------------------------

    def report_busy(self, busy: bool) -> None:
        """Report whether any request is unfinished; call it as often as that is known.

        Without one, other instances may have what is cached here at once. An engine that reports
        nothing counts as busy until half a second after its last alloc or free.
        """
        if busy is not self._reported_busy:
            self._reported_busy = busy
            self.pool.report_busy(busy)

    # --- what comes -----------------------------------------------------------------------------

    @property
    def given_back(self) -> int:
        """Of the pool's arrivals, those that came of blocks given back here."""
        return self.pool.given_back_arrivals

    @property
    def arrivals(self) -> int:
        """Changes whenever blocks can be had that could not be had before, from anywhere else.

        What is given back here does not count: the engine knows of that (`given_back`).
        """
        return (self.pool.arrivals - self.pool.given_back_arrivals) % _ARRIVALS_WRAP

    def wait_for_arrival(self, seen: int, timeout_s: float) -> bool:
        """Block until `arrivals` is another than `seen`, `timeout_s` at most; whether it is.

        `seen` is read *before* the engine looks for blocks: what comes while it looks is news.
        """
        raw = (seen + self.pool.given_back_arrivals) % _ARRIVALS_WRAP
        return self.pool.wait_for_arrival(raw, timeout_s) != raw

    # --- what always holds ----------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Compare with the pool's own books; raises `IntegrityError`. Takes a while."""
        self.pool.check_integrity()
        used = self.pool.stats()["blocks_used"]
        if used != self.used:
            raise IntegrityError(f"{self.used} blocks are in use, in the native pool {used}")
