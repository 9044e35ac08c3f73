"""Loads from the tiers into blocks of requests, concurrent with the engine's steps.

    loads.begin(load.assign("req", job, ids))    # in the step in which the engine requests it
    for load in loads.take_finished(): ...       # before the next step
    loads.wait_for_any(0.01)                     # instead of a step without work

A failed load raises no exception in the engine. A load reports how many leading blocks were loaded,
and the engine computes the others. The blocks of a load stay in use until the load is over, even if
the request has ended.

Not thread-safe: only the scheduler's thread may use it. Threads of the tiers run the loads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvelastic.tiers.load import Load
from kvelastic.tiers.policy import averaged

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
    """The loads of one scheduler that have begun and were not yet taken. Not thread-safe."""

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
