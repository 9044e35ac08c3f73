"""Figures go on being shown, and requests answered, whatever a store does."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator

import pytest
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import segment
from kvelastic.shared.segment_listing import SHM_DIR, SegmentInfo, tier_status_name
from kvelastic.shared.tier_status import BlockCounts, TierRequest, ask, read
from kvelastic.tiers.base import Capacity, StoreStatistics
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.policy import Rules
from kvelastic.tiers.publisher import Publisher, show


class Store:
    """Says what it holds when `may_answer` is set."""

    def __init__(self, name: str, records: int) -> None:
        self.name = name
        self.records = records
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.refuses = ""

    def capacity(self) -> Capacity:
        assert self.may_answer.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        return Capacity(self.records * 10, 100, self.records)

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(puts=self.records)

    def write_budget(self) -> tuple[int, int] | None:
        return (50, 40) if self.name == "disk" else None

    def problem(self) -> str:
        return self.refuses


class Tiers:
    """As much of them as the publisher asks."""

    rules = Rules()
    namespace = Namespace("m")

    def __init__(self) -> None:
        self.stores = (Store("host", 1), Store("disk", 2))
        self.users: list[Callable[[], None]] = []

    def attach(self, close: Callable[[], None]) -> None:
        self.users.append(close)

    def check_integrity(self) -> None:
        pass

    stuck_tiers = ()

    def load_s(self, tier: int) -> float | None:
        return 0.002

    def waiting_bytes(self, tier: int) -> int:
        return 0

    def block_counts(self) -> BlockCounts:
        return BlockCounts(*range(11))


@pytest.fixture
def info() -> Iterator[SegmentInfo]:
    name = f"publisher_{os.getpid()}_{random.randrange(1 << 40):x}"
    with segment.create(name, engine="test"):
        yield segment.inspect(name)


@pytest.fixture
def tiers(info: SegmentInfo) -> Iterator[Tiers]:
    tiers = Tiers()
    yield tiers
    for store in tiers.stores:
        store.may_answer.set()
    for close in tiers.users:
        close()
        close()
    assert not (SHM_DIR / tier_status_name(info.header["uuid"])).exists()


def publisher_of(tiers: Tiers, info: SegmentInfo) -> Publisher:
    publisher = show(tiers, info.header["uuid"])  # type: ignore[arg-type]
    assert publisher is not None
    assert tiers.users == [publisher.close]
    return publisher


def test_store_statistics_are_published(info: SegmentInfo, tiers: Tiers) -> None:
    publisher_of(tiers, info).publish(DEADLINE_S)
    status_file = read(info)
    assert status_file is not None
    host, disk = status_file.tiers
    assert (host.records, host.used_bytes, host.puts, host.write_left_bytes) == (1, 10, 1, None)
    assert (disk.records, disk.write_budget_bytes, disk.write_left_bytes) == (2, 50, 40)
    assert (disk.load_us, disk.is_current, disk.is_stuck) == (2000, True, False)
    assert (status_file.blocks.matched, status_file.blocks.dropped) == (0, 10)


def test_failing_medium_is_shown_with_its_reason(info: SegmentInfo, tiers: Tiers) -> None:
    publisher = publisher_of(tiers, info)
    tiers.stores[1].refuses = "é" * 100
    publisher.publish(DEADLINE_S)
    status_file = read(info)
    assert status_file is not None
    host, disk = status_file.tiers
    assert (host.state, host.problem) == ("ok", "")
    assert (disk.state, disk.problem) == ("failing", "é" * 80), "what has room of it"
    tiers.stores[1].refuses = ""
    publisher.publish(DEADLINE_S)
    status_file = read(info)
    assert status_file is not None
    assert status_file.tiers[1].state == "ok"


def test_hung_store_does_not_delay_the_others(info: SegmentInfo, tiers: Tiers) -> None:
    tiers.stores[1].may_answer.clear()
    publisher = publisher_of(tiers, info)
    publisher.publish()
    tiers.stores[0].records = 7
    publisher.publish(DEADLINE_S)
    status_file = read(info)
    assert status_file is not None
    host, disk = status_file.tiers
    assert (host.records, host.is_current) == (7, True)
    assert (disk.records, disk.is_current) == (0, False)
    threads = threading.active_count()
    for _ in range(5):
        publisher.publish()
    wait_until(
        lambda: threading.active_count() <= threads,
        "each look at a store that hangs leaves a thread",
    )
    tiers.stores[1].may_answer.set()
    while not (status_file := read(info)) or not status_file.tiers[1].is_current:
        publisher.publish()
    assert status_file.tiers[1].records == 2


def test_store_that_raises_is_shown_as_stale(info: SegmentInfo, tiers: Tiers) -> None:
    tiers.stores[0].error = OSError("odd")
    publisher_of(tiers, info).publish(DEADLINE_S)
    status_file = read(info)
    assert status_file is not None
    assert [tier.is_current for tier in status_file.tiers] == [False, True]
    answer = ask(info, TierRequest("verify"), DEADLINE_S)
    assert answer is not None
    assert (answer.state, "odd" in answer.reason) == ("failed", True)
    tiers.stores[0].error = None
    answer = ask(info, TierRequest("verify"), DEADLINE_S)
    assert answer is not None
    assert (answer.state, answer.counts[:2]) == ("done", (1, 2))


def test_missing_status_file_does_not_stop_tiers(
    info: SegmentInfo, tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    publisher_of(tiers, info)
    assert show(Tiers(), info.header["uuid"]) is None  # type: ignore[arg-type]
    assert "kvctl tiers will not see" in caplog.text
