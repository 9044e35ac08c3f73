"""Statistics of a model's recent requests, in a structure of constant size.

traffic.end(now, ...)         # one request
traffic.window(60.0, now)     # rates, latencies, tokens of the last minute

Time is divided into slots of `SLOT_S` in a ring. Latencies are counted in buckets whose bounds grow
by 10%, so a percentile is accurate to about 5%.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

SLOT_S: Final = 5.0
SLOTS: Final = 121
"""Ten minutes, and the current slot."""
MAX_WINDOW_S: Final = SLOT_S * (SLOTS - 1)

_LEAST_S: Final = 0.0005
_GROWTH: Final = 1.1
_BUCKETS: Final = 160
"""The buckets cover 0.5 ms to half an hour."""
_LOG_GROWTH: Final = math.log(_GROWTH)


def bucket_of(seconds: float) -> int:
    """Return the bucket of a latency. Bucket 0 is up to `_LEAST_S`; the last has no upper bound."""
    if seconds <= _LEAST_S:
        return 0
    return min(_BUCKETS - 1, 1 + int(math.log(seconds / _LEAST_S) / _LOG_GROWTH))


def percentile_s(counts: list[int], percent: float) -> float | None:
    """Return the latency that `percent` of the counted ones do not exceed; None without counts."""
    total = sum(counts)
    if total == 0:
        return None
    wanted = max(1, math.ceil(total * percent / 100))
    seen = 0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return float(_LEAST_S * _GROWTH ** (bucket - 0.5)) if bucket else _LEAST_S
    return None


@dataclass(eq=False)
class _Counts:
    """Counts of finished requests."""

    requests: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    """Failed requests whose clients disconnected."""
    refused: int = 0
    """Other failed requests that the controller refused."""
    tokens: int = 0
    first_sum_s: float = 0.0
    total_sum_s: float = 0.0
    first_counts: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    total_counts: list[int] = field(default_factory=lambda: [0] * _BUCKETS)


@dataclass(eq=False)
class _Slot(_Counts):
    number: int = -1


@dataclass(frozen=True)
class Window:
    """Statistics of a time window that ends now."""

    seconds: float
    requests: int
    succeeded: int
    failed: int
    tokens: int
    mean_total_s: float | None
    first_byte_s: dict[str, float | None]
    """p50, p95, p99 of the time until the response's first byte."""
    total_s: dict[str, float | None]
    """p50, p95, p99 of the time until its last byte."""


class Traffic(_Counts):
    """One model's counts since the start, and of its last ten minutes. One monotonic clock."""

    def __init__(self) -> None:
        super().__init__()
        self._slots = [_Slot() for _ in range(SLOTS)]

    def end(
        self,
        now_s: float,
        *,
        total_s: float,
        first_s: float | None,
        ok: bool,
        tokens: int = 0,
        cancelled: bool = False,
        refused: bool = False,
    ) -> None:
        """Count a finished request. `first_s` is None if the response has no body byte."""
        for counts in (self, self._slot(now_s)):
            counts.requests += 1
            counts.tokens += tokens
            counts.total_sum_s += total_s
            counts.total_counts[bucket_of(total_s)] += 1
            if first_s is not None:
                counts.first_sum_s += first_s
                counts.first_counts[bucket_of(first_s)] += 1
            if ok:
                counts.succeeded += 1
            else:
                counts.failed += 1
                counts.cancelled += cancelled
                counts.refused += refused and not cancelled

    def window(self, seconds: float, now_s: float) -> Window:
        """Return the statistics of the last `seconds`, rounded to slots, at most `MAX_WINDOW_S`."""
        seconds = min(max(seconds, SLOT_S), MAX_WINDOW_S)
        newest = int(now_s // SLOT_S)
        oldest = int((now_s - seconds) // SLOT_S) + 1
        slots = [slot for slot in self._slots if oldest <= slot.number <= newest]
        first = _added([slot.first_counts for slot in slots])
        total = _added([slot.total_counts for slot in slots])
        requests = sum(slot.requests for slot in slots)
        return Window(
            seconds=seconds,
            requests=requests,
            succeeded=sum(slot.succeeded for slot in slots),
            failed=sum(slot.failed for slot in slots),
            tokens=sum(slot.tokens for slot in slots),
            mean_total_s=sum(slot.total_sum_s for slot in slots) / requests if requests else None,
            first_byte_s=_percentiles(first),
            total_s=_percentiles(total),
        )

    def _slot(self, now_s: float) -> _Slot:
        number = int(now_s // SLOT_S)
        if self._slots[number % SLOTS].number != number:
            self._slots[number % SLOTS] = _Slot(number=number)
        return self._slots[number % SLOTS]


def bucket_bounds_s() -> list[float]:
    """Return the upper bounds of the buckets in seconds. The last bucket has none."""
    return [_LEAST_S * _GROWTH**bucket for bucket in range(_BUCKETS - 1)]


def _added(counts: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)] if counts else [0] * _BUCKETS


def _percentiles(counts: list[int]) -> dict[str, float | None]:
    return {f"p{p}": percentile_s(counts, p) for p in (50, 95, 99)}
