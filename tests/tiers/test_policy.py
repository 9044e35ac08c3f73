"""When blocks are cleaned, how much at once, and which tiers are asked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvelastic.tiers.costs import PROBE_AFTER_S, Costs, averaged
from kvelastic.tiers.policy import (
    AGED_BLOCKS,
    Occupancy,
    Rules,
    WritePolicy,
    batch_blocks,
    blocks_to_clean,
    refilled,
)

BACK, THROUGH = WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH


def to_clean(
    policy, occupancy, idle_s=0.0, watermark=0.1, affordable=1000, cache_idle_s=math.inf
) -> int:
    rules = Rules(policy, watermark=watermark, idle_after_s=5.0, cache_idle_s=cache_idle_s)
    return blocks_to_clean(rules, occupancy, idle_s=idle_s, affordable=affordable)


@pytest.mark.parametrize(
    ("used", "cached", "clean", "available", "expected"),
    [
        (50, 0, 0, 50, 0),
        (50, 40, 0, 50, 0),  # 10 free of 100
        (50, 41, 0, 50, 1),
        (50, 50, 0, 50, 10),
        (50, 50, 10, 50, 0),
        (50, 50, 9, 50, 1),
        (95, 5, 0, 5, 5),  # more than is dirty cannot be cleaned
        (100, 0, 0, 0, 0),
        (0, 0, 0, 0, 0),
    ],
)
def test_write_back_cleans_up_to_its_watermark(used, cached, clean, available, expected) -> None:
    occupancy = Occupancy(used=used, cached=cached, clean=clean, available=available)
    assert to_clean(BACK, occupancy) == expected


def test_idle_write_back_cleans_everything() -> None:
    occupancy = Occupancy(used=0, cached=40, clean=10, available=100)
    assert to_clean(BACK, occupancy, idle_s=4.9) == 0
    assert to_clean(BACK, occupancy, idle_s=5.0) == 30
    assert to_clean(BACK, occupancy, idle_s=math.inf, affordable=7) == 7


@pytest.mark.parametrize(
    ("cached", "clean", "expected"),
    [
        (90, 0, 0),  # a tenth of the bound is free
        (91, 0, 1),
        (100, 10, 0),
        (100, 4, 6),
        (130, 0, 40),  # over the bound until copies are made
    ],
)
def test_write_back_keeps_headroom_below_the_cache_bound(cached, clean, expected) -> None:
    occupancy = Occupancy(used=0, cached=cached, clean=clean, available=10_000, max_cached=100)
    assert to_clean(BACK, occupancy) == expected


def test_blocks_near_their_idle_time_are_cleaned() -> None:
    occupancy = Occupancy(used=0, cached=500, clean=10, available=10_000, oldest_copyable_s=300.0)
    assert to_clean(BACK, occupancy, cache_idle_s=600.0) == AGED_BLOCKS
    assert to_clean(BACK, occupancy, cache_idle_s=601.0) == 0


def test_write_through_cleans_at_once() -> None:
    occupancy = Occupancy(used=0, cached=40, clean=10, available=100)
    assert to_clean(THROUGH, occupancy) == 30
    assert to_clean(THROUGH, occupancy, affordable=3) == 3


@given(
    st.sampled_from(WritePolicy),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 100),
    st.floats(0, 10),
    st.floats(0, 1),
    st.integers(-5, 50),
)
def test_clean_count_is_bounded_by_dirty_and_budget(
    policy, used, cached, clean, free, idle_s, watermark, affordable
) -> None:
    clean = min(clean, cached)
    occupancy = Occupancy(used=used, cached=cached, clean=clean, available=cached + free)
    count = to_clean(policy, occupancy, idle_s, watermark, affordable)
    assert 0 <= count <= max(0, min(occupancy.dirty, affordable))
    if policy is BACK and idle_s < 5 and occupancy.spare >= watermark * occupancy.total:
        assert count == 0


def test_deadline_depends_on_the_reason() -> None:
    rules = Rules(reclaim_s=1, limit_s=2, sleep_s=3)
    assert [rules.deadline_s(r) for r in ("reclaim", "limit", "sleep", "new")] == [1, 2, 3, 1]


def test_budget_refills_at_its_rate_up_to_burst() -> None:
    assert refilled(0, 2, rate_bytes_per_s=10, burst_bytes=100) == 20
    assert refilled(95, 2, rate_bytes_per_s=10, burst_bytes=100) == 100
    assert refilled(-50, 2, rate_bytes_per_s=10, burst_bytes=100) == -30


def test_average_is_weighted() -> None:
    assert averaged(None, 4.0) == 4.0
    assert averaged(4.0, 8.0) == 4.8


@pytest.mark.parametrize(
    ("load_s", "compute_s", "unasked_s", "expected"),
    [
        (None, 1.0, 0, True),
        (1.0, None, 0, True),
        (1.0, 2.0, 0, True),
        (2.0, 1.0, 0, False),
        (2.0, 1.0, PROBE_AFTER_S, True),
    ],
)
def test_tier_slower_than_computing_is_not_used(load_s, compute_s, unasked_s, expected) -> None:
    now = [0.0]
    costs = Costs(1, clock=lambda: now[0])
    if load_s is not None:
        costs.loaded(0, 1, load_s)
    if compute_s is not None:
        costs.computed(1, compute_s)
    now[0] = unasked_s
    assert costs.worth_asking(0) is expected


def test_slow_tier_is_probed_again_later() -> None:
    now = [0.0]
    costs = Costs(2, clock=lambda: now[0])
    costs.computed(10, 1.0)
    costs.loaded(0, 1, 5.0)
    assert costs.worth_asking(1)
    assert not costs.worth_asking(0)
    now[0] = PROBE_AFTER_S
    assert costs.worth_asking(0)
    assert not costs.worth_asking(0), "one probe is enough"
    for _ in range(40):
        costs.loaded(0, 1, 0.01)
    assert costs.worth_asking(0)


def test_writes_leave_the_probe_to_requests() -> None:
    now = [0.0]
    costs = Costs(1, clock=lambda: now[0])
    costs.computed(10, 1.0)
    costs.loaded(0, 1, 5.0)
    now[0] = PROBE_AFTER_S
    assert [costs.worth_writing(0) for _ in range(2)] == [True, False]
    assert [costs.worth_asking(0) for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("rate", "deadline_s", "slots", "expected"),
    [
        (None, 0.02, 64, 4),
        (None, 0.02, 4, 2),
        (1e9, 0.02, 64, 4),  # 20 MB in the deadline, a fourth of it, 1 MiB each
        (1e12, 0.02, 64, 32),
        (1e3, 0.02, 64, 1),
        (1e9, 0.02, 1, 1),
    ],
)
def test_batch_size_follows_deadline_and_rate(rate, deadline_s, slots, expected) -> None:
    assert batch_blocks(1 << 20, rate, deadline_s=deadline_s, slots=slots) == expected
