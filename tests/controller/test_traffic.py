"""Traffic from state of a fixed size."""

from __future__ import annotations

import random
import sys

import pytest

from kvelastic.controller.models.traffic import (
    MAX_WINDOW_S,
    SLOT_S,
    Traffic,
    bucket_bounds_s,
    bucket_of,
    percentile_s,
)


def test_percentiles_are_accurate_to_6_percent() -> None:
    dice = random.Random(1)
    values = sorted(dice.lognormvariate(-2, 1.5) for _ in range(5000))
    traffic = Traffic()
    for value in values:
        traffic.end(10.0, total_s=value, first_s=value / 2, ok=True)
    window = traffic.window(60.0, 10.0)
    for percent in (50, 95, 99):
        true_s = values[int(len(values) * percent / 100)]
        assert window.total_s[f"p{percent}"] == pytest.approx(true_s, rel=0.06)
        assert window.first_byte_s[f"p{percent}"] == pytest.approx(true_s / 2, rel=0.06)


def test_old_requests_leave_the_window() -> None:
    traffic = Traffic()
    traffic.end(100.0, total_s=1, first_s=1, ok=True, tokens=7)
    traffic.end(170.0, total_s=1, first_s=None, ok=False)
    window = traffic.window(60.0, 171.0)
    assert (window.requests, window.failed, window.tokens) == (1, 1, 0)
    window = traffic.window(300.0, 171.0)
    assert (window.requests, window.succeeded, window.tokens) == (2, 1, 7)
    assert traffic.requests == 2


def test_each_failed_request_has_one_cause() -> None:
    traffic = Traffic()
    traffic.end(0.0, total_s=1, first_s=None, ok=False, cancelled=True, refused=True)
    assert (traffic.failed, traffic.cancelled, traffic.refused) == (1, 1, 0)


def test_reused_slot_is_cleared() -> None:
    traffic = Traffic()
    traffic.end(0.0, total_s=1, first_s=1, ok=True)
    traffic.end(MAX_WINDOW_S + SLOT_S, total_s=1, first_s=1, ok=True)
    assert traffic.window(MAX_WINDOW_S, MAX_WINDOW_S + SLOT_S).requests == 1


def test_traffic_memory_does_not_grow() -> None:
    def size(traffic: Traffic) -> int:
        slots = traffic._slots
        return sum(
            sys.getsizeof(s.first_counts) + sys.getsizeof(s.total_counts) for s in slots
        ) + len(slots)

    traffic = Traffic()
    before = size(traffic)
    for number in range(20_000):
        traffic.end(number / 3, total_s=number / 100, first_s=0.1, ok=True)
    assert size(traffic) == before


def test_buckets_match_their_bounds() -> None:
    bounds = bucket_bounds_s()
    for bucket, bound in enumerate(bounds):
        assert bucket_of(bound * 0.999) <= bucket
        assert bucket_of(bound * 1.001) == bucket + 1
    assert percentile_s([0] * 160, 50) is None
