"""A load of blocks from the tiers: the records found, the destination blocks, and the transfer.

    load = tiers.match(keys)               # found; the tiers keep its records
    tiers.load(load, ids)                  # running; the tiers release the records at the end
    load.wait(1.0); load.failed            # over: indices of the blocks to compute

    load.release()                         # instead of starting it: over, with nothing loaded

`Loads` are the loads of a scheduler, concurrent with its steps::

    loads.begin(load.assign("req", job, ids))    # in the step in which the engine requests it
    for load in loads.take_finished(): ...       # before the next step
    loads.wait_for_any(0.01)                     # instead of a step without work

A failed load raises no exception in the engine. A load reports how many leading blocks were loaded,
and the engine computes the others. The blocks of a load stay in use until the load is over, even if
the request has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Final

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import KEY_BYTES, NO_KEY, Hold, each_key
from kvelastic.tiers.costs import averaged
from kvelastic.tiers.lookup import Segment
from kvelastic.tiers.transfer_run import Run

if TYPE_CHECKING:
    from kvelastic.tiers.manager import Tiers

_LOOK_S: Final = 0.002
_FIRST_LOOK: Final = 0.08
"""Part of the time to compute the blocks after which progress is first checked. It bounds the time
lost to a tier that hangs."""
_PATIENCE: Final = 4.0
"""Multiple of the recent load time during which a load may stall, for example behind a write."""
_UNMEASURED_S: Final = 0.1
"""Assumed time to compute a block, until one was measured. An upper estimate."""


class Load:
    """The leading keys of a lookup that tiers have, and their load.

    Thread-safe, except for `assign`. The records are not evicted before the load is over. On exit
    from a `with` statement, a load that was not started releases its records.
    """

    def __init__(
        self,
        keys: bytes = b"",
        segments: Sequence[Segment] = (),
        holds: Sequence[Hold] = (),
        chain_after: bytes = NO_KEY,
        epoch: int = 0,
    ) -> None:
        """`keys` may have more keys than `segments`: the remaining ones were not found."""
        self.segments = tuple(segments)
        self.count = sum(segment.count for segment in segments)
        """Number of leading keys found."""
        self.keys = keys[: self.count * KEY_BYTES]
        self.chain_after = chain_after
        self.epoch = epoch
        """Number of erasures in the tiers so far, at the time of the lookup."""
        self.request = ""
        """The engine's id of the request."""
        self.job = 0
        """The engine's number for this load."""
        self.ids: tuple[int, ...] = ()
        """The ids of the engine's destination blocks. May be more than `count`."""
        self.began_s = 0.0
        self._parents: list[bytes] | None = None
        """The parent of each key. None if each key continues the one before."""
        self._holds = tuple(holds)
        self._lock = threading.Lock()
        self._is_starting = False
        self._is_released = False
        self._run: Run | None = None

    @property
    def parents(self) -> list[bytes]:
        """The parent of each key: the key of the preceding block."""
        if self._parents is not None:
            return self._parents
        return [self.chain_after, *each_key(self.keys)][: self.count]

    # --- before it runs ------------------------------------------------------------------------

    def assign(self, request: str, job: int, ids: Iterable[int]) -> Load:
        """Set the request's id, the engine's number of the load, and the blocks. Return `self`."""
        self.request, self.job, self.ids = request, job, tuple(ids)
        return self

    def release(self) -> None:
        """Release the records, unless the load was started. Idempotent. Never waits for I/O."""
        with self._lock:
            if self._is_starting:
                return
        self.end()

    def starts(self, ids: Sequence[int]) -> None:
        """Mark the load as started. Only the tiers call this.

        Block `ids[i]` gets the record of key i. Raises `InvalidArgumentError` if there are more
        blocks than keys, or if the load was started or released before.
        """
        if len(ids) > self.count:
            raise InvalidArgumentError(
                f"{len(ids)} blocks were given for a match of {self.count}; give no more"
            )
        with self._lock:
            if self._is_starting or self._is_released:
                raise InvalidArgumentError(
                    "this load was started or released before; look the keys up again"
                )
            self._is_starting = True
            self.ids = self.ids or tuple(ids)

    def runs(self, run: Run) -> None:
        """Set the transfer. Only the tiers call this, and `end` when the transfer is complete."""
        self._run = run

    def end(self) -> None:
        """Release the records, even if the load was started. Only for the tiers. Idempotent."""
        for hold in self.take_holds():
            hold.release()

    def take_holds(self) -> Sequence[Hold]:
        """End the load without releasing its records.

        Returns their holds, which the caller must release. A second call returns none.
        """
        with self._lock:
            self._is_released = True
            holds, self._holds = self._holds, ()
        return holds

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # --- while it runs -------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True if the load is over: its results are final, and no thread accesses its blocks."""
        run = self._run
        return self._is_released if run is None else run.is_complete

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the load is done, for at most `timeout_s`. Return True if it is done.

        Returns immediately if the load was not started.
        """
        run = self._run
        return self.done if run is None else run.wait(timeout_s)

    def cancel(self) -> None:
        """Cancel the load. Never blocks. Idempotent.

        A copy in progress still completes, so the blocks may be written until the load is `done`.
        """
        run = self._run
        if run is None:
            self.release()
        else:
            run.cancel()

    @property
    def arrived(self) -> int:
        """Number of records read from their tiers so far, including those copied into blocks."""
        return 0 if self._run is None else sum(self._run.staged)

    # --- when it is done -----------------------------------------------------------------------

    @property
    def failed(self) -> list[int]:
        """Indices into `ids` of the blocks that were not loaded. The engine must compute them.

        Valid once the load is done.
        """
        loaded = [] if self._run is None else self._run.loaded
        missing = range(len(loaded), len(self.ids))
        return [at for at, is_loaded in enumerate(loaded) if not is_loaded] + list(missing)

    @property
    def leading(self) -> int:
        """Number of leading blocks that were loaded. Valid once the load is done."""
        return next(iter(self.failed), len(self.ids))


def merged(keys: bytes, held: Sequence[Load]) -> Load:
    """Combine the loads in `held`, and return one load for the leading `keys` that they found.

    The new load takes over the records of the loads in `held`. Those loads are then over and cannot
    be started. If anything was erased since the earliest of their lookups, the new load loads
    nothing.
    """
    places: dict[bytes, tuple[int, bytes]] = {}
    holds: list[Hold] = []
    for load in held:
        tiers = [each.tier for each in load.segments for _ in range(each.count)]
        places.update(zip(each_key(load.keys), zip(tiers, load.parents, strict=True), strict=True))
        holds += load.take_holds()
    found = [places[key] for key in takewhile(places.__contains__, each_key(keys))]
    segments: list[Segment] = []
    for tier, those in groupby(found, key=lambda place: place[0]):
        first = segments[-1].first + segments[-1].count if segments else 0
        segments.append(Segment(tier, first, len(list(those))))
    one = Load(keys, segments, holds, epoch=min((load.epoch for load in held), default=0))
    one._parents = [parent for _, parent in found]
    return one


def is_too_slow(
    elapsed_s: float,
    blocks: int,
    arrived: int,
    *,
    compute_s: float | None,
    load_s: float | None = None,
) -> bool:
    """Return True if computing all `blocks` would take less time than the whole load.

    At its current rate, the load takes `elapsed_s * blocks / arrived` in total. `arrived` counts
    records in staging, because a copy into blocks may wait for pages, which says nothing about the
    tier. `compute_s` and `load_s` are recent seconds per block for computing and loading, or None
    if not measured yet. They also define a grace period, during which the result is False.
    """
    computing_s = blocks * (_UNMEASURED_S if compute_s is None else compute_s)
    patience_s = max(_FIRST_LOOK * computing_s, _PATIENCE * blocks * (load_s or 0.0))
    return elapsed_s > patience_s and elapsed_s * blocks > computing_s * arrived


class Loads:
    """The loads of one scheduler that have begun and were not yet taken.

    Not thread-safe: only the scheduler's thread may use it. Threads of the tiers run the loads.
    """

    def __init__(
        self,
        tiers: Tiers,
        *,
        compares: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `compares`, cancel loads and skip tiers that are slower than computing the blocks.

        `clock` returns seconds, like `time.monotonic`.
        """
        self._tiers = tiers
        self._compares = compares
        self._clock = clock
        self._open: list[Load] = []
        self._load_s: float | None = None
        """Moving average of the seconds per block, from loads that loaded all their blocks."""

    def begin(self, load: Load) -> None:
        """Start a load into its assigned blocks. Blocks without a found key are not loaded."""
        load.began_s = self._clock()
        try:
            if load.count:
                self._tiers.load(load, load.ids[: load.count])
        finally:
            load.release()
        self._open.append(load)

    def refuse(self, load: Load) -> None:
        """Release a load instead of starting it. `take_finished` returns it as failed."""
        load.release()
        self._open.append(load)

    def computed(self, blocks: int, seconds: float) -> None:
        """Report that the engine computed `blocks` blocks in `seconds`.

        With `compares`, tiers that load more slowly are skipped.
        """
        if self._compares:
            self._tiers.computed(blocks, seconds)

    def give_up_slow(self) -> None:
        """Cancel loads that are slower than computing. Blocks that were loaded stay valid."""
        if not self._compares:
            return
        now_s, compute_s = self._clock(), self._tiers.compute_s
        for load in self._open:
            if not load.done and is_too_slow(
                now_s - load.began_s,
                len(load.ids),
                load.arrived,
                compute_s=compute_s,
                load_s=self._load_s,
            ):
                load.cancel()

    @property
    def open(self) -> int:
        """Number of loads that `take_finished` has not returned yet."""
        return len(self._open)

    @property
    def has_finished(self) -> bool:
        """True if `take_finished` would return a load."""
        return any(load.done for load in self._open)

    def take_finished(self) -> list[Load]:
        """Return the loads that have ended since the last call. Returns each load once."""
        finished = [load for load in self._open if load.done]
        if finished:
            self._open = [load for load in self._open if load not in finished]
        for load in finished:
            if load.ids and load.leading == len(load.ids):
                took_s = self._clock() - load.began_s
                self._load_s = averaged(self._load_s, took_s / len(load.ids))
        return finished

    def wait_for_any(self, timeout_s: float) -> bool:
        """Block until a load is over, for at most `timeout_s`. Return True if one is over.

        Returns False immediately if there are no loads.
        """
        end_s = time.monotonic() + timeout_s
        while self._open and not self.has_finished:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            self._open[0].wait(left_s if len(self._open) == 1 else min(left_s, _LOOK_S))
        return self.has_finished

    def cancel_all(self, timeout_s: float) -> bool:
        """Cancel all loads and block until they are over, for at most `timeout_s`.

        Returns True if all are over.
        """
        end_s = time.monotonic() + timeout_s
        for load in self._open:
            load.cancel()
        return all(load.wait(max(0.0, end_s - time.monotonic())) for load in self._open)
