"""Loads from the tiers into blocks of requests, on their way beside the engine's steps.

    loads.begin("req", job, match, ids)          # in the step in which the engine asks for it
    for load in loads.take_finished(): ...       # before the next step
    loads.wait_for_any(0.01)                     # in the place of empty steps

A load never fails for an engine: how many of the leading blocks hold their records is answered, and
the rest is computed. Blocks of a load are in use by its request until it is over, also where the
request has ended before.

Used by the scheduler's thread only; threads of the tiers carry the loads out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvelastic.tiers.policy import averaged

_LOOK_S: Final = 0.002
_FIRST_LOOK: Final = 0.08
"""Part of the time that computing takes, after which a load is judged for the first time: it must
have got somewhere by then. What is lost with a tier that hangs is no more than that."""
_PATIENCE: Final = 4.0
"""Times that loads of late have taken: as long a load may get nowhere, behind a write, say."""
_UNMEASURED_S: Final = 0.1
"""What computing a block is taken for until one was computed: never less."""


class Loading(Protocol):
    """A load that the tiers carry out."""

    @property
    def done(self) -> bool:
        """Whether its blocks are touched by nobody any more."""

    @property
    def arrived(self) -> int:
        """How many records have come from their tiers by now."""

    @property
    def count(self) -> int:
        """How many leading blocks hold their records by now; stands once it is done."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is done, `timeout_s` at most; answers whether it is."""

    def cancel(self) -> None:
        """Begin nothing more of it. Repeatable."""


class LoadingTiers(Protocol):
    """What loading needs of the tiers."""

    def load(self, match: Any, ids: Sequence[int]) -> Loading:
        """Bring the first keys of a match into blocks that are in use. Never blocks.

        Holds what the match holds until it is done.
        """

    def computed(self, blocks: int, seconds: float) -> None:
        """The engine has computed so many blocks in so long."""

    @property
    def compute_s(self) -> float | None:
        """What computing a block takes, seconds; None before one was."""


@dataclass(frozen=True)
class Load:
    """One load of one request."""

    request: str
    job: int
    """The engine's number of it."""
    blocks: int
    loading: Loading | None
    """None: it was not begun."""
    began_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether its blocks are touched by nobody any more."""
        return self.loading is None or self.loading.done

    @property
    def leading(self) -> int:
        """How many of the leading blocks hold their records; for one that is over."""
        return 0 if self.loading is None else self.loading.count


def is_too_slow(
    elapsed_s: float,
    blocks: int,
    arrived: int,
    *,
    compute_s: float | None,
    load_s: float | None = None,
) -> bool:
    """Whether computing would be over before a load of which so many records have arrived.

    What has arrived is as good as loaded: a copy into blocks may wait behind pages that are being
    mapped, which says nothing of the tier. `compute_s` is what computing a block takes and `load_s`
    what loading one has taken of late, None where there was none yet. A load that goes on as it did
    ends after `elapsed_s * blocks / arrived`.
    """
    computing_s = blocks * (_UNMEASURED_S if compute_s is None else compute_s)
    patience_s = max(_FIRST_LOOK * computing_s, _PATIENCE * blocks * (load_s or 0.0))
    return elapsed_s > patience_s and elapsed_s * blocks > computing_s * arrived


class Loads:
    """See the module."""

    def __init__(
        self,
        tiers: LoadingTiers,
        *,
        compares: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compares`: a load is given up, and a tier not asked, where computing is quicker."""
        self._tiers = tiers
        self._compares = compares
        self._clock = clock
        self._open: list[Load] = []
        self._load_s: float | None = None
        """What a block of the whole loads of late has taken."""

    def begin(self, request: str, job: int, match: Any, ids: Sequence[int]) -> None:
        """Begin a load of what the match holds into these blocks, and release the match.

        It may hold less than there are blocks.
        """
        try:
            loading = self._tiers.load(match, ids[: match.count]) if match.count else None
        finally:
            match.release()
        self._open.append(Load(request, job, len(ids), loading, self._clock()))

    def refuse(self, request: str, job: int, blocks: int) -> None:
        """A load that is not to begin: it is over, with nothing loaded."""
        self._open.append(Load(request, job, blocks, None))

    def computed(self, blocks: int, seconds: float) -> None:
        """The engine has computed so many blocks in so long: what a tier has to beat."""
        if self._compares:
            self._tiers.computed(blocks, seconds)

    def give_up_slow(self) -> None:
        """Begin nothing more of those that computing would overtake: what they have, stays."""
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
        """How many were begun and not taken."""
        return len(self._open)

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` would give something."""
        return any(load.is_over for load in self._open)

    def take_finished(self) -> list[Load]:
        """Those that are over and were not taken yet."""
        finished = [load for load in self._open if load.is_over]
        if finished:
            self._open = [load for load in self._open if load not in finished]
        for load in finished:
            if load.leading == load.blocks:
                took_s = self._clock() - load.began_s
                self._load_s = averaged(self._load_s, took_s / load.blocks)
        return finished

    def wait_for_any(self, timeout_s: float) -> bool:
        """Block until one is over, `timeout_s` at most; answers whether one is."""
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
        """Begin nothing more of any, and block until all are over, `timeout_s` at most.

        Answers whether they are.
        """
        end_s = time.monotonic() + timeout_s
        loadings = [load.loading for load in self._open if load.loading is not None]
        for loading in loadings:
            loading.cancel()
        return all(loading.wait(max(0.0, end_s - time.monotonic())) for loading in loadings)
