"""Random sequences of every call of a pool, against a small model that keeps the rules.

The rules: no block is handed out twice; a block that is handed out has memory, and keeps what was
written into it until it is given back; bytes counted are bytes held; what is said to be available
can be had, and one more cannot; after "applied" no more is held than the limit allows; and a pool
that sleeps hands out nothing, and holds nothing that is not in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Literal

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
from open_memfds import open_memfds

from kvelastic import _vmm, errors
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import native_geometry

pytestmark = pytest.mark.slow


MIB = 1 << 20
PAGES = 6
LAYOUTS = {
    "paged": PageLayout(block_bytes=64 << 10, buffers=4, blocks_per_page=8, extent_bytes=2 * MIB),
    "a block that divides no page": PageLayout(24 << 10, 5, 16, 2 * MIB),
    "one block a page": PageLayout(MIB, 2, 1, 2 * MIB),
    "two words of blocks": PageLayout(14 << 10, 2, 70, 2 * MIB),
    "per buffer": PageLayout(100 << 10, 3, 19, 2 * MIB, per_buffer=True),
}


class PoolRules(RuleBasedStateMachine):
    layout: PageLayout
    max_cached = -1
    movable = False

    @initialize()
    def make(self) -> None:
        before = open_memfds()
        self.memory = _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(self.layout, PAGES))
        (self.memfd,) = (fd for inode, fd in open_memfds().items() if inode not in before)
        self.page_bytes = self.layout.page_bytes
        self.blocks = PAGES * self.layout.blocks_per_page
        self.pool = _vmm.Pool(
            self.memory,
            max_blocks=self.blocks,
            limit_bytes=PAGES * self.page_bytes,
            capacity_bytes=PAGES * self.page_bytes,
            max_cached_blocks=self.max_cached,
            movable=self.movable,
        )
        self.limit_pages = PAGES
        self.asleep = False
        self.used: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.pins: dict[int, tuple[str, set[int]]] = {}
        self.read: dict[int, int] = {}
        """What is free as soon as its last pin ends; its contents stay until then."""
        self.tag = 0

    # --- memory ---------------------------------------------------------------------------------

    def places(self, block: int) -> list[int]:
        """The first and the last byte of the block in every buffer."""
        found = []
        for buffer in range(self.layout.buffers):
            at = self.memory.address + self.layout.offset_bytes(block, buffer, PAGES)
            found += [at, at + self.layout.block_bytes - 1]
        return found

    def write(self, block: int) -> None:
        self.tag = self.tag % 250 + 1
        for at in self.places(block):
            ctypes.memset(at, self.tag, 1)
        self.used[block] = self.tag

    def check(self, block: int, tag: int) -> None:
        seen = {ctypes.string_at(at, 1)[0] for at in self.places(block)}
        assert seen == {tag}, f"block {block} holds {seen}, {tag} was written"

    # --- rules ----------------------------------------------------------------------------------

    @rule(count=st.integers(0, 40))
    def alloc(self, count: int) -> None:
        available = self.pool.available_size()
        ids = self.pool.alloc(count)
        self.forget_evicted()
        assert (ids is None) == (count > available)
        for block in ids or ():
            assert block != 0
            assert self.layout.is_valid(block, PAGES)
            assert block not in self.used, "handed out twice"
            assert block not in self.cached, "a cached block was handed out"
            assert block not in self.read, "a pinned block was handed out"
            self.write(block)

    @rule(count=st.integers(0, 40))
    def alloc_reusing_pinned_blocks(self, count: int) -> None:
        available = self.pool.available_size() + self.pool.reusable
        ids = self.pool.alloc(count, reuse=True)
        self.forget_evicted()
        assert (ids is None) == (count > available)
        for block in ids or ():
            assert block not in self.used
            assert block not in self.cached
            if self.read.pop(block, None) is not None:
                assert block not in self.pinned("strict")
            self.write(block)

    @precondition(lambda self: self.used or self.cached or self.read)
    @rule(data=st.data(), kind=st.sampled_from(["strict", "fenced", "ordered"]))
    def pin(self, data: st.DataObject, kind: Literal["strict", "fenced", "ordered"]) -> None:
        blocks = self.some(data, self.used | self.cached | self.read)
        for wrong in ([*blocks, 0], [*blocks, 10**15]):
            with pytest.raises(errors.BlockError):
                self.pool.pin(wrong, kind=kind)
        self.pins[self.pool.pin(blocks * 2, kind=kind)] = (kind, set(blocks))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pins)))
        del self.pins[ticket]
        for block in self.read.keys() - self.pinned():
            self.check(block, self.read.pop(block))
        assert self.pool.unpin(ticket)
        assert not self.pool.unpin(ticket), "it ends once"
        self.forget_evicted()

    def pinned(self, kind: str | None = None) -> set[int]:
        return {b for of, blocks in self.pins.values() for b in blocks if kind in (None, of)}

    def given_back(self, blocks: Iterable[tuple[int, int]]) -> None:
        pinned = self.pinned()
        self.read |= {block: tag for block, tag in blocks if block in pinned}

    @rule()
    def alloc_all_available(self) -> None:
        available = self.pool.available_size()
        assert self.pool.alloc(available + 1) is None
        ids = self.pool.alloc(available)
        assert ids is not None
        self.forget_evicted()
        assert len(set(ids)) == available
        assert not set(ids) & set(self.used)
        self.pool.free(ids)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        for block in self.some(data, self.used):
            tag = self.used.pop(block)
            self.check(block, tag)
            self.pool.free([block])
            self.given_back([(block, tag)])
            self.forget_evicted()

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        blocks = self.some(data, self.used)
        self.cached |= {block: self.used.pop(block) for block in blocks}
        self.pool.cache(blocks)
        self.forget_evicted()
        if self.max_cached >= 0:
            assert len(self.cached.keys() - self.pinned()) <= self.max_cached

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = self.some(data, self.cached)
        self.pool.touch(blocks)
        self.used |= {block: self.cached.pop(block) for block in blocks}

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def free_cached(self, data: st.DataObject) -> None:
        blocks = self.some(data, self.cached)
        tags = [(block, self.cached.pop(block)) for block in blocks]
        for block, tag in tags:
            self.check(block, tag)
        self.pool.free(blocks)
        self.given_back(tags)
        self.forget_evicted()

    @rule(wrong=st.sampled_from([0, -1, 10**15, 1 << 62, -(1 << 63)]), data=st.data())
    def free_invalid_ids(self, wrong: int, data: st.DataObject) -> None:
        blocks = self.some(data, self.used) if self.used else []
        before = self.pool.stats()
        for ids in ([*blocks, wrong], [*blocks, *blocks] if blocks else [wrong]):
            with pytest.raises(errors.BlockError):
                self.pool.free(ids)
            with pytest.raises(errors.BlockError):
                self.pool.cache([*ids])
            with pytest.raises(errors.BlockError):
                self.pool.touch([*ids])
        assert self.pool.stats() == before

    @rule(count=st.integers(0, 30))
    def reserve(self, count: int) -> None:
        before = self.pool.stats()["blocks_reserved"]
        if self.pool.try_to_reserve(count):
            assert self.pool.stats()["blocks_reserved"] == before + count
        self.forget_evicted()

    @rule()
    def free_reserved(self) -> None:
        self.pool.free_reserved()
        self.forget_evicted()

    @rule(pages=st.integers(0, 2 * PAGES))
    def limit(self, pages: int) -> None:
        state = self.pool.set_limit(pages * self.page_bytes)
        self.limit_pages = min(max(pages, 1), PAGES)
        self.forget_evicted()
        self.check_limit_state(state)

    @rule()
    def sleep(self) -> None:
        self.asleep = True
        state = self.pool.sleep()
        self.forget_evicted()
        assert not self.cached, "asleep, and something is cached"
        self.check_limit_state(state)

    @rule()
    def wake(self) -> None:
        self.asleep = False
        self.pool.wake()
        self.check_limit_state(self.pool.limit_state())

    def check_limit_state(self, state: dict[str, Any]) -> None:
        effective = 0 if self.asleep else self.limit_pages * self.page_bytes
        assert state["effective_limit_bytes"] == effective
        assert (state["state"] == "applied") == (self.pool.mapped_bytes <= effective)

    @rule(count=st.integers(0, 60))
    def ensure(self, count: int) -> None:
        before = dict(self.cached)
        assert self.pool.ensure(count) == self.pool.available_mapped()
        assert not self.pool.has_evicted
        assert self.cached == before

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        assert self.pool.stats()["pages_parked"] == 0

    @precondition(lambda self: self.movable)
    @rule()
    def compact(self) -> None:
        before, cached = self.pool.stats(), len(self.cached)
        moved = self.pool.compact()
        self.forget_evicted()
        assert len(self.cached) == cached, "compaction lost contents"
        if moved:
            assert self.pool.stats()["pages_parked"] == before["pages_parked"] + 1

    @precondition(lambda self: self.movable)
    @rule()
    def compact_all(self) -> None:
        while self.pool.compact():
            pass
        self.forget_evicted()
        stats = self.pool.stats()
        if stats["blocks_reserved"] or self.pool.is_over_limit:
            return  # on which pages those are, and which pages are to drain, is not seen from here
        # The page that is emptied first does not fit into the holes of the others any more.
        pages = {page: count for page, count in self.pool.occupancy().items() if count}
        in_use = {self.layout.page_of(block) for block in (*self.used, *self.pinned())} | {0}
        only_cached = [count for page, count in pages.items() if page not in in_use]
        if only_cached:
            least = min(only_cached)
            room = sum(self.layout.blocks_per_page - (page == 0) for page in pages)
            holes = room - sum(pages.values()) - (self.layout.blocks_per_page - least)
            assert holes < least

    @rule()
    def clear(self) -> None:
        self.given_back(self.used.items())
        self.used.clear()
        self.pool.clear()
        self.forget_evicted()
        assert not self.cached

    # --- what holds after each ------------------------------------------------------------------

    def some(self, data: st.DataObject, blocks: dict[int, int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(blocks)), min_size=1, unique=True))

    def forget_evicted(self) -> None:
        for block, to in self.pool.take_changes():
            assert to == -1 or self.movable
            tag = self.cached.pop(block, None)
            assert tag is not None, "moved or evicted, and was not cached"
            if to == -1:
                self.given_back([(block, tag)])
                continue
            assert block not in self.pinned(), "moved, and somebody reads it"
            assert to not in self.used
            assert to not in self.cached, "moved onto another cached block"
            self.cached[to] = tag

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        self.memory.check_integrity()
        stats = self.pool.stats()
        assert stats["blocks_used"] == len(self.used)
        pinned = self.pinned()
        assert stats["blocks_cached"] == len(self.cached.keys() - pinned)
        waiting = self.read.keys() | self.cached.keys() & pinned
        assert set(self.pool.pinned()) == waiting
        assert stats["blocks_pinned"] == len(waiting)
        assert stats["pages_mapped"] == self.memory.mapped_pages
        assert self.memory.held_bytes == self.pool.mapped_bytes
        # The null block's page is mapped first; before that nothing is held at all.
        assert self.memfd.stat().st_blocks * 512 == self.pool.mapped_bytes
        assert self.pool.is_asleep == self.asleep
        room = 0 if self.asleep else self.limit_pages * self.layout.blocks_per_page - 1
        if self.asleep:
            assert stats["blocks_reserved"] == 0
        if self.asleep and not self.used and not waiting:
            assert self.pool.mapped_bytes == 0
        assert self.pool.available_size() <= max(room - len(self.used) - len(waiting), 0)

    @invariant()
    def contents_are_unchanged(self) -> None:
        if hasattr(self, "pool"):
            for block, tag in (self.used | self.cached | self.read).items():
                self.check(block, tag)


SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rules_hold_while_blocks_move(layout: PageLayout) -> None:
    machine = type("Machine", (PoolRules,), {"layout": layout, "movable": True})
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.parametrize("bound", [-1, 0, 11], ids=["unbounded", "no cache", "11 cached"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rules_hold(layout: PageLayout, bound: int) -> None:
    machine = type("Machine", (PoolRules,), {"layout": layout, "max_cached": bound})
    run_state_machine_as_test(machine, settings=SETTINGS)
