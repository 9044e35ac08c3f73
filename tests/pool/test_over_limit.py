"""Which requests make way for a limit: the pure choice, and how long is waited for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from native_pools import HUGE, LAYOUTS, Memory

from kvelastic.pool.scheduling import over_limit
from kvelastic.pool.scheduling.blocks import SchedulerBlocks
from kvelastic.pool.scheduling.over_limit import NOTHING, Choice, Holder, OverLimit, choose_requests

A_PAGE = 10
"""Ids of a page in these tests: block 23 lies on page 2."""


def choose(
    pages: int,
    holders: Sequence[tuple[int, Sequence[int]]],
    others: Mapping[int, int] | None = None,
    given_back: Sequence[int] = (),
) -> Choice:
    """`others`: blocks in use by page that are no request's."""
    used = dict.fromkeys(range(1, 6), 0)
    for block in {block for _, blocks in holders for block in blocks} | set(given_back):
        used[block // A_PAGE] += 1
    for page, count in (others or {}).items():
        used[page] += count
    return choose_requests(
        pages,
        used,
        given_back,
        [Holder(tokens, blocks) for tokens, blocks in holders],
        lambda block: block // A_PAGE,
    )


def test_requests_with_least_progress_are_preempted_first() -> None:
    holders = [(900, [11, 21]), (100, [31]), (50, [41]), (700, [51])]
    assert choose(1, holders) == ([2], True)
    assert choose(2, holders) == ([2, 1], True)
    assert choose(3, holders) == ([2, 1, 3], True)
    assert choose(4, holders) == ([2, 1, 3, 0], True)


def test_preempted_request_makes_its_other_pages_cheaper() -> None:
    holders = [(100, [11, 12, 21]), (10, [31, 22]), (60, [41]), (500, [51])]
    # Page 3 costs 10, page 4 then 60; page 2 costs 100 without the request that has gone.
    assert choose(2, holders) == ([1, 2], True)
    assert choose(3, holders) == ([1, 2, 0], True)
    assert choose(4, holders) == ([1, 2, 0], True)


def test_shared_blocks_require_every_request_using_them() -> None:
    holders = [(10, [11]), (20, [11]), (40, [21]), (99, [31, 41, 51])]
    assert choose(1, holders) == ([0, 1], True)


def test_already_empty_pages_need_no_preemption() -> None:
    holders = [(10, [11]), (10, [21]), (10, [31])]
    assert choose(2, holders) == ([], True), "pages 4 and 5 are empty"
    assert choose(2, holders, given_back=[41, 51]) == ([], True), "steps on their way use them"


def test_pages_with_foreign_blocks_are_not_counted() -> None:
    holders = [(10, [11]), (20, [21]), (30, [31]), (40, [41]), (50, [51])]
    assert choose(1, holders, others={1: 1}) == ([1], True)
    assert choose(5, holders, others={1: 1}) == ([1, 2, 3, 4], False)


def test_pool_within_its_limit_preempts_no_request() -> None:
    assert choose(0, [(10, [11])]) == ([], True)


def test_cost_is_read_linearly_in_the_blocks() -> None:
    reads = 0

    class Counted(Holder):
        def __getattribute__(self, name: str) -> Any:
            nonlocal reads
            reads += name == "tokens"
            return super().__getattribute__(name)

    pages, requests = 200, 20
    # Each page has blocks of five requests, and no two pages in a row of the same five.
    blocks: list[list[int]] = [[] for _ in range(requests)]
    for block in range(5 * pages):
        blocks[(block + block // 5) % requests].append(block)
    holders = [Counted(100 + index, ids) for index, ids in enumerate(blocks)]
    choice = choose_requests(
        pages, dict.fromkeys(range(pages), 5), [], holders, lambda block: block // 5
    )
    assert (sorted(choice.requests), choice.is_enough) == (list(range(requests)), True)
    assert reads <= 3 * 5 * pages


@pytest.mark.parametrize("wait_s", [0.25, None])
def test_requests_are_preempted_only_after_wait_time(
    wait_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS["paged"]
    now_s = 100.0
    monkeypatch.setattr(over_limit, "time", SimpleNamespace(monotonic=lambda: now_s))
    pool = Memory(layout, 4).pool()
    blocks = SchedulerBlocks(pool)
    ids = blocks.take(4 * layout.blocks_per_page - 1)
    assert ids is not None
    watch = OverLimit(blocks, wait_s)

    def read() -> list[Holder]:
        return [Holder(10, ids)]

    assert watch.choose(read) == NOTHING
    pool.set_limit(2 * HUGE)
    assert watch.choose(read) == NOTHING, "the time begins"
    now_s += 0.24
    assert watch.choose(read) == NOTHING
    now_s += 0.02
    assert watch.choose(read) == (NOTHING if wait_s is None else ([0], True))
    pool.set_limit(4 * HUGE)
    assert watch.choose(read) == NOTHING
    pool.set_limit(2 * HUGE)
    assert watch.choose(read) == NOTHING, "it begins anew"


@pytest.mark.parametrize(("kind", "is_enough"), [("ordered", True), ("strict", False)])
def test_only_pins_of_steps_are_about_to_end(kind: str, is_enough: bool) -> None:
    """A prefill engine holds blocks by strict pins, for as long as its decode engines need."""
    layout = LAYOUTS["paged"]
    pool = Memory(layout, 4).pool()
    blocks = SchedulerBlocks(pool)
    ids = blocks.take(4 * layout.blocks_per_page - 1)
    assert ids is not None
    pool.pin(ids, kind=kind)
    blocks.give_back(ids)
    watch = OverLimit(blocks, 0.0)
    pool.set_limit(2 * HUGE)
    assert watch.choose(list) == Choice([], is_enough)
