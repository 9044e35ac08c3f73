"""Asynchronous loads from the tiers into blocks of requests, concurrent with the engine's steps.

    loads.begin("req", job, match, ids)          # in the step in which the engine requests it
    for load in loads.take_finished(): ...       # before the next step
    loads.wait_for_any(0.01)                     # instead of empty steps

A load never raises in the engine. It reports how many leading blocks were loaded, and the engine
computes the rest. The blocks of a load stay in use until the load is over, even if the request has
ended.

Not thread-safe: only the scheduler's thread may use it. Threads of the tiers run the loads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvelastic.tiers.policy import averaged

_LOOK_S: Final = 0.002
_FIRST_LOOK: Final = 0.08
"""Fraction of the computing time after which a load is first checked for progress. It bounds the
time lost to a tier that hangs."""
_PATIENCE: Final = 4.0
"""Multiple of the recent load time during which a load may stall, for example behind a write."""
_UNMEASURED_S: Final = 0.1
"""Assumed time to compute a block before one was measured. An upper estimate."""


class Loading(Protocol):
    """A load that the tiers carry out."""

    @property
    def done(self) -> bool:
        """Whether no thread accesses the load's blocks now or later."""

    @property
    def arrived(self) -> int:
        """Number of records read from their tiers so far."""

    @property
    def count(self) -> int:
        """Number of leading blocks loaded so far. Final when the load is done."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the load is done, for at most `timeout_s`. Returns whether it is done."""

    def cancel(self) -> None:
        """Start no further operation of the load. Idempotent."""


class LoadingTiers(Protocol):
    """The part of the tiers that loading needs."""

    def load(self, match: Any, ids: Sequence[int]) -> Loading:
        """Load the first keys of a match into blocks that are in use. Never blocks.

        Holds the match until the load is done.
        """

    def computed(self, blocks: int, seconds: float) -> None:
        """Report that the engine computed `blocks` blocks in `seconds`."""

    @property
    def compute_s(self) -> float | None:
        """Seconds to compute one block; None before the first measurement."""


@dataclass(frozen=True)
class Load:
    """One load of one request."""

    request: str
    job: int
    """The engine's number for this load."""
    blocks: int
    loading: Loading | None
    """None: the load was refused or had nothing to load."""
    began_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no thread accesses the load's blocks now or later."""
        return self.loading is None or self.loading.done

    @property
    def leading(self) -> int:
        """Number of leading blocks that were loaded. Valid once the load is over."""
        return 0 if self.loading is None else self.loading.count


def is_too_slow(
    elapsed_s: float,
    blocks: int,
    arrived: int,
    *,
    compute_s: float | None,
    load_s: float | None = None,
) -> bool:
    """Return whether computing all `blocks` would finish before the load does.

    Returns False during a grace period, which depends on `compute_s` and `load_s`.
    `arrived` counts records in staging. A copy into blocks may wait for pages to be mapped, which
    says nothing about the tier. `compute_s` and `load_s` are recent seconds per block for computing
    and loading, None if not measured yet. At its current rate, the load takes
    `elapsed_s * blocks / arrived` in total.
    """
    computing_s = blocks * (_UNMEASURED_S if compute_s is None else compute_s)
    patience_s = max(_FIRST_LOOK * computing_s, _PATIENCE * blocks * (load_s or 0.0))
    return elapsed_s > patience_s and elapsed_s * blocks > computing_s * arrived


class Loads:
    """The open loads of one scheduler. Not thread-safe."""

    def __init__(
        self,
        tiers: LoadingTiers,
        *,
        compares: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """If `compares` is set, slow loads are cancelled and slow tiers skipped.

        Slow means slower than computing the blocks.
        """
        self._tiers = tiers
        self._compares = compares
        self._clock = clock
        self._open: list[Load] = []
        self._load_s: float | None = None
        """Moving average of the seconds per block, over loads that loaded all their blocks."""

    def begin(self, request: str, job: int, match: Any, ids: Sequence[int]) -> None:
        """Start loading the keys of a match into these blocks, and release the match.

        The match may have fewer keys than there are blocks.
        """
        try:
            loading = self._tiers.load(match, ids[: match.count]) if match.count else None
        finally:
            match.release()
        self._open.append(Load(request, job, len(ids), loading, self._clock()))

    def refuse(self, request: str, job: int, blocks: int) -> None:
        """Add a load that is already over, with no block loaded."""
        self._open.append(Load(request, job, blocks, None))

    def computed(self, blocks: int, seconds: float) -> None:
        """Report that the engine computed `blocks` blocks in `seconds`.

        Tiers that load more slowly are skipped, if `compares` is set.
        """
        if self._compares:
            self._tiers.computed(blocks, seconds)

    def give_up_slow(self) -> None:
        """Cancel the loads that are slower than computing. Blocks loaded so far stay loaded."""
        if not self._compares:
            return
        now_s, compute_s = self._clock(), self._tiers.compute_s
        for load in self._open:
            if load.loading is None or load.is_over:
                continue
            if is_too_slow(
                now_s - load.began_s,
                load.blocks,
                load.loading.arrived,
                compute_s=compute_s,
                load_s=self._load_s,
            ):
                load.loading.cancel()

    @property
    def open(self) -> int:
        """Number of loads that `take_finished` has not returned yet."""
        return len(self._open)

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` would return a load."""
        return any(load.is_over for load in self._open)

    def take_finished(self) -> list[Load]:
        """Return the loads that are over, each exactly once."""
        finished = [load for load in self._open if load.is_over]
        if finished:
            self._open = [load for load in self._open if load not in finished]
        for load in finished:
            if load.leading == load.blocks:
                took_s = self._clock() - load.began_s
                self._load_s = averaged(self._load_s, took_s / load.blocks)
        return finished

    def wait_for_any(self, timeout_s: float) -> bool:
        """Block until a load is over, for at most `timeout_s`. Returns whether one is.

        Returns False at once if there are no loads.
        """
        end_s = time.monotonic() + timeout_s
        while self._open and not self.has_finished:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            loading = self._open[0].loading
            if loading is not None:
                loading.wait(left_s if len(self._open) == 1 else min(left_s, _LOOK_S))
        return self.has_finished

    def cancel_all(self, timeout_s: float) -> bool:
        """Cancel all loads and block until they are over, for at most `timeout_s`.

        Returns whether all are over.
        """
        end_s = time.monotonic() + timeout_s
        loadings = [load.loading for load in self._open if load.loading is not None]
        for loading in loadings:
            loading.cancel()
        return all(loading.wait(max(0.0, end_s - time.monotonic())) for loading in loadings)
