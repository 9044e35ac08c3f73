"""Chooses requests to preempt when they keep a pool over its limit for too long.

A page can be released only when none of its blocks is used. Requests with a few blocks on each of
many pages would hold all the pages until they end. So after a while kvelastic chooses as many pages
as exceed the limit, those whose requests have computed least, and preempts their requests::

    page   1: a a b .    2: a a a a    3: b b . .       two pages over the limit; a has computed
                                                        100 tokens, b 10: b is preempted for page
                                                        3, then a for page 1, which b has left
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvelastic.pool.scheduling.blocks import SchedulerBlocks


@dataclass(frozen=True)
class Holder:
    """A request that could be preempted."""

    tokens: int
    """Tokens that it has computed and would compute again."""
    blocks: Collection[int]
    """Ids; requests may share blocks."""


class Choice(NamedTuple):
    """Which requests to preempt, by index, the cheapest first."""

    requests: list[int]
    is_enough: bool
    """Whether the limit holds once steps on their way have ended, if no request is admitted."""


NOTHING = Choice([], False)


def choose_requests(
    excess_pages: int,
    used: Mapping[int, int],
    given_back: Collection[int],
    holders: Sequence[Holder],
    page_of: Callable[[int], int],
) -> Choice:
    """Choose requests so that `excess_pages` pages have no block in use.

    `used` has the number of blocks in use of every page that may be emptied, `given_back` the ids
    that only wait for steps to end. A page with other used blocks is not considered.
    """
    blocks_on: dict[int, set[int]] = defaultdict(set)
    holders_on: dict[int, set[int]] = defaultdict(set)
    pages_of: dict[int, set[int]] = defaultdict(set)
    for index, holder in enumerate(holders):
        for block in holder.blocks:
            page = page_of(block)
            blocks_on[page].add(block)
            holders_on[page].add(index)
            pages_of[index].add(page)
    waiting_on: dict[int, int] = defaultdict(int)
    for block in given_back:
        waiting_on[page_of(block)] += 1
    # Tokens that emptying each page still costs.
    cost = {
        page: sum(holders[index].tokens for index in holders_on[page])
        for page in used
        if used[page] <= len(blocks_on[page]) + waiting_on[page]
    }
    # When a page gets cheaper, a second entry is pushed and the first one is stale.
    cheapest = [(tokens, len(blocks_on[page]), page) for page, tokens in cost.items()]
    heapify(cheapest)
    chosen: list[int] = []
    while excess_pages > 0 and cost:
        tokens, _, emptied = heappop(cheapest)
        if cost.get(emptied) != tokens:
            continue
        del cost[emptied]
        excess_pages -= 1
        others = sorted(holders_on[emptied], key=lambda index: (holders[index].tokens, index))
        chosen += others
        for index in others:
            for page in pages_of[index]:
                holders_on[page].remove(index)
                if page in cost:
                    cost[page] -= holders[index].tokens
                    heappush(cheapest, (cost[page], len(blocks_on[page]), page))
    return Choice(chosen, excess_pages <= 0)


class OverLimit:
    """How long a pool has been over its limit; `wait_s` None: requests are left to end."""

    def __init__(self, blocks: SchedulerBlocks, wait_s: float | None) -> None:
        self._blocks = blocks
        self._wait_s = wait_s
        self._since_s: float | None = None

    def choose(self, read_holders: Callable[[], Sequence[Holder]]) -> Choice:
        """Choose requests to preempt before this step; call it in its session.

        Costs a read of one word while the limit holds.
        """
        pool = self._blocks.pool
        if self._wait_s is None or not pool.is_over_limit:
            self._since_s = None
            return NOTHING
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < self._wait_s:
            return NOTHING
        excess_pages, used = pool.excess()
        geometry = pool.geometry

        def page_of(block: int) -> int:
            return block * geometry.block_bytes // geometry.extent_bytes

        # Not those with a strict pin: a prefill engine holds them for a minute.
        given_back = pool.pinned(strict=False)
        return choose_requests(excess_pages, used, given_back, read_holders(), page_of)
