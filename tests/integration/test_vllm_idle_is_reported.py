"""An engine without unfinished requests is idle at once: its neighbours may have its cache.

The pool, its ledger and its neighbour are real; vLLM's scheduler and core are stood in for by what
the wrappers read of them. No clock is waited for: two pools of one process follow each other faster
than the half second after which an engine that reports nothing is idle.
"""

from __future__ import annotations

from typing import Any

import needs
import pytest
from test_vllm_memory_wait import Engine
from two_pools import BLOCKS_PER_PAGE, PAGES, TwoPools

from kvelastic.shared import ledger

pytestmark = [
    pytest.mark.slow,
    needs.vllm,
    pytest.mark.usefixtures("vllm_is_imported"),
    pytest.mark.filterwarnings("ignore"),
]


class Reports:
    """A native pool, and what is reported to it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.reports: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def report_busy(self, busy: bool) -> None:
        self.reports.append(busy)
        self._pool.report_busy(busy)


def is_idle(shared: TwoPools) -> bool | None:
    """What the first of the two has reported, as all others see it."""
    name = shared.segments[0].name
    members = [member for info in ledger.list_ledgers() for member in info.members]
    (found,) = [member.is_idle for member in members if member.name == name]
    return found


def test_busy_and_idle_are_reported_once_each(shared: TwoPools) -> None:
    engine = Engine(shared.pools[0])
    memory: Any = engine.pool.memory
    native = memory.pool = Reports(memory.pool)
    assert is_idle(shared) is None
    for _ in range(5):
        assert engine.turn()
    assert native.reports == [True]
    assert is_idle(shared) is False
    engine.in_the_step = engine.scheduler.requests.clear  # it ends in this step
    assert engine.turn()
    assert native.reports == [True, False]
    assert is_idle(shared) is True
    engine.in_the_step = lambda: None
    engine.scheduler.requests["s"] = None
    assert engine.turn()
    assert native.reports == [True, False, True]


def test_abort_makes_the_engine_idle_at_next_step(shared: TwoPools) -> None:
    engine = Engine(shared.pools[0])
    assert engine.turn()
    engine.scheduler.requests.clear()
    assert is_idle(shared) is False
    assert engine.turn()
    assert is_idle(shared) is True


def test_idle_engine_makes_its_cache_reclaimable(
    shared: TwoPools,
) -> None:
    a, b = shared.pools
    engine = Engine(a)
    assert engine.turn()
    ids = a.alloc(PAGES * BLOCKS_PER_PAGE - 1)
    assert ids is not None
    a.cache(ids)
    assert b.available_size() == 0, "it has a request, whose prefix this may be"
    engine.in_the_step = engine.scheduler.requests.clear
    assert engine.turn()
    assert b.available_size() >= (PAGES - 2) * BLOCKS_PER_PAGE
