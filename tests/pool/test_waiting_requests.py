"""Requests that wait for memory: what the pool publishes, what is logged, and when not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from own_pool import BLOCKS_PER_PAGE as B
from own_pool import LAYOUT, PAGES, own_settings, start_pool
from waiting import DEADLINE_S

from kvelastic.instance.reading import look_at
from kvelastic.pool.pool import ElasticPool
from kvelastic.pool.scheduling import waiting
from kvelastic.pool.scheduling.blocks import SchedulerBlocks
from kvelastic.pool.scheduling.waiting import WaitingRequests
from kvelastic.shared import ledger, segment

PAGE = LAYOUT.page_bytes


@pytest.fixture
def pool() -> Iterator[ElasticPool]:
    made = start_pool(own_settings())
    yield made
    made.close(discard=True)
    ledger.reap()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the reporter takes for the time: `now_s`."""
    made = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


@pytest.fixture
def reporter(pool: ElasticPool, clock: SimpleNamespace) -> WaitingRequests:
    return WaitingRequests(SchedulerBlocks(pool.blocks), pool.name)


def limit(pool: ElasticPool, limit_bytes: int) -> None:
    answer = segment.request(pool.name, limit_bytes=limit_bytes, wait_s=DEADLINE_S)
    assert answer.state == "applied"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_waiting_count_is_unknown_without_a_report(pool) -> None:
    status = look_at(pool.name)
    assert (status.requests_waiting, status.is_limit_too_low) == (None, False)


def test_first_request_need_is_published_in_whole_pages(pool, reporter) -> None:
    reporter.report(0)
    assert look_at(pool.name).requests_waiting == 0
    reporter.report(3, first_blocks=2 * B - 1, first_may_blocks=2 * B)
    status = look_at(pool.name)
    assert status.requests_waiting == 3
    assert status.first_needs_bytes == 2 * PAGE, "the null block has a place of its own"
    assert status.first_may_need_bytes == 3 * PAGE
    assert pool.blocks.alloc(1) is not None
    assert look_at(pool.name).first_needs_bytes == 2 * PAGE, "it stays with each publication"
    limit(pool, 2 * PAGE)
    free = pool.blocks.available_size()
    assert free == 2 * B - 2, "with the block that is in use the request has its place"
    reporter.report(0)
    assert look_at(pool.name).first_needs_bytes == 0


@pytest.mark.parametrize(
    ("limit_bytes", "needed_blocks", "state"),
    [
        (2 * PAGE, 2 * B - 1, "applied"),
        (2 * PAGE, 2 * B, "stuck"),
        (3 * PAGE - 1, 2 * B, "stuck"),
        (0, B - 1, "applied"),
        (0, B, "stuck"),
        ((1 << 63) - 1, PAGES * B, "stuck"),
    ],
    ids=[
        "as much as fits",
        "one block more",
        "less than a whole page more",
        "the least limit has one page",
        "more than one page",
        "more than the device",
    ],
)
def test_state_is_stuck_if_request_exceeds_the_limit(
    pool, reporter, caplog, limit_bytes, needed_blocks, state
) -> None:
    limit(pool, limit_bytes)
    reporter.report(1, first_blocks=needed_blocks)
    assert look_at(pool.name).word == state
    assert len(warnings(caplog)) == (state == "stuck")


def test_log_line_names_the_need_and_the_command(pool, reporter, clock, caplog) -> None:
    limit(pool, 2 * PAGE)
    for _ in range(3):
        reporter.report(2, first_blocks=2 * B, first_may_blocks=4 * B)
        clock.now_s += 2 * waiting.WARN_EVERY_S
    (line,) = warnings(caplog)
    for part in (
        "2 requests wait",
        "needs 6.00 MiB",
        "allow 4.00 MiB",
        f"kvctl limit {pool.name} 10M",
        f"kvctl explain {pool.name}",
    ):
        assert part in line
    limit(pool, 10 * PAGE)
    reporter.report(2, first_blocks=2 * B, first_may_blocks=4 * B)
    limit(pool, 2 * PAGE)
    reporter.report(2, first_blocks=2 * B, first_may_blocks=4 * B)
    assert len(warnings(caplog)) == 2, "it fitted, and does not again"


def test_changing_requests_do_not_flood_the_log(pool, reporter, clock, caplog) -> None:
    limit(pool, 2 * PAGE)
    for blocks in range(2 * B, 2 * B + 5):
        reporter.report(1, first_blocks=8 * blocks)
        reporter.report(0)
    assert len(warnings(caplog)) == 1
    clock.now_s += waiting.WARN_EVERY_S
    reporter.report(1, first_blocks=8 * B)
    assert len(warnings(caplog)) == 2


def test_sleeping_instance_is_never_reported_as_stuck(pool, reporter, caplog) -> None:
    limit(pool, 2 * PAGE)
    segment.request(pool.name, asleep=True, wait_s=DEADLINE_S)
    reporter.report(1, first_blocks=2 * B)
    assert look_at(pool.name).word == "asleep"
    assert warnings(caplog) == []
    segment.request(pool.name, asleep=False, wait_s=DEADLINE_S)
    assert look_at(pool.name).word == "stuck"
