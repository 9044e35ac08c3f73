"""Random sequences on a pool whose driver fails now and then: nothing is lost or told wrongly.

test_pool_rules.py has the sequences without failures and the full model; here any call may meet one
failing driver call, after which everything must be as before, or done.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from native_pools import LAYOUTS, Memory, evicted

from kvelastic import errors

pytestmark = pytest.mark.slow


PAGES = 5


class FailingDriver(RuleBasedStateMachine):
    name = ""

    @initialize(bound=st.sampled_from([-1, 0, 9]))
    def make(self, bound: int) -> None:
        self.memory = Memory(LAYOUTS[self.name], PAGES)
        self.page_bytes = self.memory.layout.page_bytes
        # Fewer blocks than there is room for: both bounds are met.
        most = PAGES * self.memory.layout.blocks_per_page
        self.pool = self.memory.pool(max_blocks=max(2, most - 1), max_cached_blocks=bound)
        self.used: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.reserved = 0
        self.asleep = False
        self.tag = 0
        self.armed = False

    # --- what a test cannot choose ---------------------------------------------------------------

    @rule(call=st.integers(1, 30))
    def fail_a_later_driver_call(self, call: int) -> None:
        self.memory.driver.arm(call)
        self.armed = True

    def take(self, count: int) -> list[int] | None:
        ids = self.pool.alloc(count)
        self.forget_evicted()
        for block in ids or ():
            assert block not in self.used
            assert block not in self.cached
            self.tag = self.tag % 250 + 1
            self.memory.write(block, self.tag)
            self.used[block] = self.tag
        return ids

    def forget_evicted(self) -> None:
        for block in evicted(self.pool):
            assert self.cached.pop(block, None) is not None, "evicted, and was not cached"

    def some(self, data: st.DataObject, blocks: dict[int, int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(blocks)), min_size=1, unique=True))

    # --- rules -----------------------------------------------------------------------------------

    @rule(count=st.integers(0, 30))
    def alloc(self, count: int) -> None:
        available, before, cached = self.pool.available_size(), self.pool.stats(), dict(self.cached)
        ids = self.take(count)
        if ids is not None:
            assert len(ids) == count <= available
            self.reserved = max(0, self.reserved - count)
            return
        assert count > available or self.armed
        assert self.cached == cached, "none, and contents were dropped"
        after = self.pool.stats()
        for figure in ("blocks_used", "blocks_cached", "blocks_reserved"):
            assert after[figure] == before[figure]

    @rule(count=st.integers(0, 60))
    def ensure(self, count: int) -> None:
        assert self.pool.ensure(count) == self.pool.available_mapped()
        assert not self.pool.has_evicted

    @rule(count=st.integers(0, 12))
    def reserve(self, count: int) -> None:
        if self.pool.try_to_reserve(count):
            self.reserved += count
        self.forget_evicted()

    @rule()
    def free_reserved(self) -> None:
        self.pool.free_reserved()
        self.reserved = 0
        self.forget_evicted()

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.some(data, self.used)
        self.pool.free(blocks)
        for block in blocks:
            del self.used[block]
        self.forget_evicted()

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        blocks = self.some(data, self.used)
        self.pool.cache(blocks)
        self.cached |= {block: self.used.pop(block) for block in blocks}
        self.forget_evicted()

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = self.some(data, self.cached)
        self.pool.touch(blocks)
        self.used |= {block: self.cached.pop(block) for block in blocks}

    @rule(pages=st.integers(0, 2 * PAGES))
    def limit(self, pages: int) -> None:
        try:
            state = self.pool.set_limit(pages * self.page_bytes)
        except errors.MappingError:
            assert self.armed
            state = self.pool.limit_state()
        self.forget_evicted()
        # All of what is reserved makes way, or none.
        reserved = self.pool.stats()["blocks_reserved"]
        assert reserved == self.reserved or (reserved == 0 and not self.asleep)
        self.reserved = reserved
        effective = 0 if self.asleep else min(max(pages, 1), PAGES) * self.page_bytes
        assert state["effective_limit_bytes"] == effective
        if state["state"] == "applied":
            assert self.memory.held_at_the_os() <= state["effective_limit_bytes"]

    @rule()
    def sleep(self) -> None:
        self.asleep = True
        try:
            state = self.pool.sleep()
        except errors.MappingError:
            assert self.armed
            state = self.pool.limit_state()
        self.forget_evicted()
        assert not self.cached
        self.reserved = 0
        if state["state"] == "applied" or not (self.used or self.armed):
            assert self.memory.held_at_the_os() == 0

    @rule()
    def wake(self) -> None:
        self.asleep = False
        self.pool.wake()

    @rule()
    def trim(self) -> None:
        try:
            given = self.pool.trim()
        except errors.MappingError:
            assert self.armed
            return
        assert given % self.page_bytes == 0
        assert self.pool.stats()["pages_parked"] == 0

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.used.clear()
        self.forget_evicted()
        self.reserved = 0
        assert not self.cached

    # --- what holds after each -------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert not self.memory.range.failed, "one failure can always be undone"
        self.pool.check_integrity()
        self.memory.range.check_integrity()
        assert self.pool.is_asleep == self.asleep
        assert not (self.asleep and self.pool.available_size())
        stats = self.pool.stats()
        assert stats["blocks_used"] == len(self.used)
        assert stats["blocks_cached"] == len(self.cached)
        assert stats["blocks_reserved"] == self.reserved
        held = self.memory.held_at_the_os()
        assert self.pool.mapped_bytes == self.memory.range.held_bytes == held
        for block, tag in (self.used | self.cached).items():
            assert self.memory.read(block) == {tag}


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_failure_at_a_time(name: str) -> None:
    machine = type("Machine", (FailingDriver,), {"name": name})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
