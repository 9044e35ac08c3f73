"""The elastic block pool alone: random calls in vLLM's order, over real memory.

Each block that becomes cached has its number written into its memory. Whatever the prefix cache
finds later must still have it there, however the limit went up and down in between.
"""

from __future__ import annotations

import itertools

import needs
import pytest
from elastic_pools import LAYOUT, PAGES, key_of, make_memory, make_pool
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvelastic.errors import KvelasticError, PoolExhaustedError, UnsupportedEngineError

# vLLM warns when it is imported; that is not what is tested here.
pytestmark = [
    pytest.mark.slow,
    needs.vllm,
    pytest.mark.usefixtures("vllm_is_imported"),
    pytest.mark.filterwarnings("ignore"),
]

BLOCKS = PAGES * LAYOUT.blocks_per_page
COUNTS = st.integers(0, 2 * LAYOUT.blocks_per_page)


def cache_a_block(pool):
    """Take a block, give it contents of number 1 and give it back; answers it. In a session."""
    (block,) = pool.get_new_blocks(1)
    pool._insert_block_hash(key_of(1), block, num_tokens=32)
    pool.free_blocks([block])
    return block


def find(pool, number: int):
    found = pool.get_cached_block(number.to_bytes(8, "big"), [0])
    return found[0] if found else None


class Scheduler(RuleBasedStateMachine):
    """Requests hold lists of blocks, the later ones dependent on the earlier ones."""

    def __init__(self) -> None:
        import torch

        super().__init__()
        self.arena, self.memory = make_memory(max_cached_blocks=3 * LAYOUT.blocks_per_page)
        self.tensor = torch.from_dlpack(self.arena.tensor())
        self.pool = make_pool(self.memory, enable_kv_cache_events=True)
        self.requests: list[list] = []
        self.numbers = itertools.count(1)
        self.written: dict[int, int] = {}
        self.on_their_way: list[tuple[int, set[int]]] = []
        """Steps that were scheduled and have not ended, and the blocks that they may touch."""
        self.transfers: list[tuple[dict[int, int], int]] = []
        """What is read outside of any step: number by block id."""

    def at(self, block, buffer: int) -> slice:
        start = LAYOUT.offset_bytes(block.block_id, buffer, PAGES)
        return slice(start, start + 8)

    def write(self, block, number: int) -> None:
        import torch

        value = torch.frombuffer(bytearray(number.to_bytes(8, "big")), dtype=torch.int8)
        for buffer in range(LAYOUT.buffers):
            self.tensor[self.at(block, buffer)] = value

    def read(self, block, buffer: int) -> int:
        assert self.arena.is_mapped(LAYOUT.page_of(block.block_id))
        return int.from_bytes(self.tensor[self.at(block, buffer)].numpy().tobytes(), "big")

    # --- what a scheduler does ------------------------------------------------------------------

    @rule(count=COUNTS, known=st.integers(0, 40), cached=st.booleans())
    def admit(self, count: int, known: int, cached: bool) -> None:
        """As allocate_slots: look up, prepare, check, touch, take."""
        with self.pool.session():
            hits = [block for number in sorted(self.written)[-known:] if known
                    and (block := find(self.pool, number)) is not None]  # fmt: skip
            for block in hits:
                numbers = {self.read(block, buffer) for buffer in range(LAYOUT.buffers)}
                assert len(numbers) == 1
                assert block.block_hash == key_of(numbers.pop())
            revived = len({block.block_id for block in hits if block.ref_cnt == 0})
            self.pool.memory.prepare(count + revived)
            if count + revived > self.pool.get_num_free_blocks():
                assert self.pool.memory.fell_short
                return
            self.pool.touch(hits)
            new = self.pool.get_new_blocks(count)
        assert len({block.block_id for block in new}) == count
        for block in new:
            assert not block.is_null
            assert block.ref_cnt == 1
            number = next(self.numbers)
            self.write(block, number)
            if cached:
                self.pool._insert_block_hash(key_of(number), block, num_tokens=32)
                self.written[number] = block.block_id
        self.requests.append(hits + new)

    @rule(cached=st.booleans())
    def admit_largest_request(self, cached: bool) -> None:
        with self.pool.session():
            count = self.pool.memory.reachable
        self.admit(count, 0, cached)
        with self.pool.session():
            assert self.pool.memory.reachable == 0

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.pool.free_blocks(reversed(self.requests.pop(index)))

    @rule()
    def compact_pages(self) -> None:
        with self.pool.session():
            before = {number for number in self.written if find(self.pool, number)}
        while self.memory.compact():
            pass
        with self.pool.session():
            assert {number for number in self.written if find(self.pool, number)} == before
            for number in before:
                block = find(self.pool, number)
                assert {self.read(block, buffer) for buffer in range(LAYOUT.buffers)} == {number}

    @rule(count=st.integers(1, BLOCKS + 1))
    def take_more_than_available(self, count: int) -> None:
        with self.pool.session():
            available = self.pool.memory.reachable
            if count <= available:
                return
            used = {block.block_id for request in self.requests for block in request}
            with pytest.raises(PoolExhaustedError, match=f"Cannot get {count} free blocks"):
                self.pool.get_new_blocks(count)
            assert self.pool.memory.reachable == available
            assert used <= set(self.pool.blocks.ids())

    # --- steps, several of which may be on their way at once ------------------------------------

    @precondition(lambda self: len(self.on_their_way) < 3)
    @rule()
    def step_begins(self) -> None:
        in_use = {block.block_id for request in self.requests for block in request}
        self.on_their_way.append((self.pool.memory.step_begins(), in_use))

    @precondition(lambda self: self.on_their_way)
    @rule()
    def step_ends(self) -> None:
        step, _ = self.on_their_way.pop(0)
        self.pool.memory.step_ends(step)

    # --- transfers, which read blocks that nobody refers to any more ----------------------------

    @precondition(lambda self: len(self.transfers) < 3)
    @rule(data=st.data())
    def transfer_begins(self, data) -> None:
        with self.pool.session():
            known = [number for number in self.written if find(self.pool, number) is not None]
            chosen = data.draw(st.lists(st.sampled_from(known), max_size=6)) if known else []
            reads = {find(self.pool, number).block_id: number for number in chosen}
            ticket = self.pool.pin(reads)
        self.transfers.append((reads, ticket))

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), later=st.booleans())
    def transfer_ends(self, data, later: bool) -> None:
        _, ticket = self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1)))
        memory = self.pool.memory
        (memory.unpin_after_next_step if later else memory.unpin)(ticket)

    # --- what an operator does, at any time -----------------------------------------------------

    @rule(pages=st.integers(1, PAGES))
    def set_limit(self, pages: int) -> None:
        state = self.memory.set_limit(pages * LAYOUT.page_bytes)
        if state["state"] == "applied":
            assert self.memory.mapped_bytes <= pages * LAYOUT.page_bytes

    @rule()
    def trim(self) -> None:
        self.memory.trim()

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() is (not any(self.requests))
        if not any(self.requests) and not self.pool.memory.held_back:
            assert self.pool.blocks.ids() == [0]

    @rule(numbers=st.sets(st.integers(0, 20)))
    def evict(self, numbers: set[int]) -> None:
        with self.pool.session():
            victims = {b.block_id for n in numbers if (b := find(self.pool, n)) is not None}
            self.pool.evict_blocks(victims)
            assert not any(find(self.pool, number) for number in numbers)

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        with self.pool.session():
            held = {block.block_id for request in self.requests for block in request}
            used = {b.block_id for b in self.pool.blocks if b.ref_cnt > 0 and not b.is_null}
            assert used == held
            waiting = self.pool.memory.held_back
            idle = [
                b
                for b in self.pool.blocks
                if b.ref_cnt == 0 and not b.is_null and b.block_id not in waiting
            ]
            assert not waiting & held
            if not self.on_their_way and not self.pool.memory._pins_after_next_step:
                assert waiting <= {id_ for reads, _ in self.transfers for id_ in reads}
            for reads, _ in self.transfers:
                for id_, number in reads.items():
                    assert self.arena.is_mapped(LAYOUT.page_of(id_)), "a pinned page stays"
                    block = find(self.pool, number)
                    # Unless vLLM itself has taken it for something else, it is where it was.
                    if block is not None:
                        assert block.block_id == id_
                        assert self.read(block, 0) == number
            for _, may_touch in self.on_their_way:
                assert all(self.arena.is_mapped(LAYOUT.page_of(id_)) for id_ in may_touch)
            assert all(block.block_hash is not None for block in idle)
            assert len(idle) == self.memory.stats()["blocks_cached"]
            assert 0 <= self.pool.get_usage() <= 1
        self._follow_events()

    def _follow_events(self) -> None:
        """Events of removal name what is no longer found, and nothing else."""
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

        for event in self.pool.take_events():
            if isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    raw = key if isinstance(key, bytes) else key.to_bytes(8, "big")
                    self.written.pop(int.from_bytes(raw, "big"), None)
            elif isinstance(event, AllBlocksCleared):
                self.written.clear()
        with self.pool.session():
            for number in self.written:
                assert find(self.pool, number) is not None

    def teardown(self) -> None:
        for _, ticket in self.transfers:
            self.pool.memory.unpin(ticket)
        self.on_their_way.append((self.pool.memory.step_begins(), set()))
        while self.on_their_way:
            self.step_ends()
        for request in self.requests:
            self.pool.free_blocks(request)
        self.pool.reset_prefix_cache()
        assert self.memory.stats()["blocks_used"] == 0
        self.memory.trim()
        assert self.memory.mapped_bytes <= LAYOUT.page_bytes
        self.memory.close(discard=True)


Scheduler.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_random_calls_in_the_order_of_a_scheduler = Scheduler.TestCase


def test_block_freed_during_a_step_keeps_its_page() -> None:
    arena, memory = make_memory()
    pool = make_pool(memory)
    per_page = LAYOUT.blocks_per_page
    with pool.session():
        blocks = pool.get_new_blocks(3 * per_page)
    first, second = pool.memory.step_begins(), pool.memory.step_begins()
    pool.memory.step_ends(first)
    pool.free_blocks(blocks)  # the request has ended, and the second step still writes
    memory.trim()
    assert all(arena.is_mapped(LAYOUT.page_of(block.block_id)) for block in blocks)
    assert pool.memory.reachable >= len(blocks), "vLLM may have them again at once"
    assert memory.set_limit(LAYOUT.page_bytes)["state"] == "shrinking"
    assert all(arena.is_mapped(LAYOUT.page_of(block.block_id)) for block in blocks)
    pool.memory.step_ends(second)
    assert memory.mapped_bytes == LAYOUT.page_bytes
    pool.check_integrity()


def test_held_back_block_can_be_found_and_reused() -> None:
    _, memory = make_memory()
    pool = make_pool(memory)
    with pool.session():
        kept, lost = pool.get_new_blocks(2)
        for number, block in enumerate((kept, lost)):
            pool._insert_block_hash(key_of(number), block, num_tokens=32)
        step = pool.memory.step_begins()
        pool.free_blocks([kept, lost])
        assert find(pool, 0) is kept
        pool.touch([kept])
        assert pool.memory.held_back == {lost.block_id}
        everything = pool.get_num_free_blocks()
        memory.set_limit(memory.mapped_bytes)
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
        assert lost.block_id in {block.block_id for block in taken}
        assert find(pool, 1) is None
        assert everything >= len(taken)
        pool.memory.step_ends(step)
    pool.check_integrity()


def test_blocks_reused_during_a_step_are_tracked() -> None:
    """A load that wrote to one at once would meet the step's own reads and writes."""
    _, memory = make_memory()
    pool = make_pool(memory)
    with pool.session():
        given_back = pool.get_new_blocks(LAYOUT.blocks_per_page)
    memory.set_limit(memory.mapped_bytes)
    first, second = pool.memory.step_begins(), pool.memory.step_begins()
    pool.free_blocks(given_back)  # preempted, say
    with pool.session():
        fresh = pool.get_new_blocks(pool.get_num_free_blocks() - len(given_back))
        assert pool.memory.reused_under == 0
        (anew,) = pool.get_new_blocks(1)
    assert anew.block_id in {block.block_id for block in given_back}
    assert pool.memory.reused_under == second
    pool.memory.step_ends(first)
    assert pool.memory.reused_under == second
    pool.memory.step_ends(second)
    assert pool.memory.reused_under == 0
    pool.free_blocks([*fresh, anew])
    pool.check_integrity()


def test_over_limit_only_staying_pages_are_reused() -> None:
    """The others keep a page from draining, and who got one would keep it for a whole request."""
    _, memory = make_memory()
    pool = make_pool(memory)
    with pool.session():
        blocks = pool.get_new_blocks(BLOCKS - 1)
    for number, block in enumerate(blocks):
        pool._insert_block_hash(key_of(number), block, num_tokens=32)
    step = pool.memory.step_begins()
    memory.set_limit(2 * LAYOUT.page_bytes)
    pool.free_blocks(blocks[:-4])
    assert pool.memory.held_back
    with pool.session():
        assert not any(find(pool, number) for number in range(len(blocks) - 4)), "found again"
        room = 2 * LAYOUT.blocks_per_page - 1 - 4
        assert 0 < pool.get_num_free_blocks() <= room
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
        assert pool.get_num_free_blocks() == 0
    stay = {LAYOUT.page_of(block.block_id) for block in taken}
    assert len(stay) <= 2, "pages over the limit were handed out again"
    pool.memory.step_ends(step)
    # The last blocks lie on a page of their own; with them gone the limit holds.
    pool.free_blocks(blocks[-4:])
    assert memory.limit_state()["over_bytes"] == 0
    assert {LAYOUT.page_of(block.block_id) for block in taken} <= set(memory.occupancy())
    pool.check_integrity()


def test_refused_touch_changes_nothing() -> None:
    _, memory = make_memory()
    pool = make_pool(memory)
    with pool.session():
        gone = cache_a_block(pool)
        (other,) = pool.get_new_blocks(1)
        pool.memory.step_begins()
        pool.free_blocks([other])  # held back: it waits for the step
    memory.sleep()  # evicts the first, which nobody has followed: it was not in a session
    with pytest.raises(KvelasticError):
        pool.touch([other, gone])
    assert (gone.ref_cnt, other.ref_cnt) == (0, 0)
    assert pool.memory.held_back == {other.block_id}
    pool.check_integrity()


def test_pinned_block_is_neither_unmapped_nor_moved() -> None:
    arena, memory = make_memory()
    pool = make_pool(memory)
    per_page = LAYOUT.blocks_per_page
    with pool.session():
        blocks = pool.get_new_blocks(3 * per_page)
    kept = blocks[2 * per_page]
    for number, block in enumerate(blocks):
        pool._insert_block_hash(key_of(number), block, num_tokens=32)
    first, second = pool.pin([kept.block_id]), pool.pin([kept.block_id])
    pool.free_blocks(blocks)
    page = LAYOUT.page_of(kept.block_id)
    state = memory.set_limit(LAYOUT.page_bytes)
    assert state["state"] == "shrinking"
    while memory.compact():
        pass
    assert arena.is_mapped(page)
    assert pool.memory.held_back == {kept.block_id}
    pool.memory.unpin(first)
    pool.memory.unpin(first)  # a reader that says so twice is one reader
    assert arena.is_mapped(page), "one reader is left"
    pool.memory.unpin(second)
    assert memory.limit_state()["over_bytes"] == 0
    assert not arena.is_mapped(page)
    pool.check_integrity()


def test_cached_block_can_be_pinned() -> None:
    arena, memory = make_memory()
    pool = make_pool(memory)
    with pool.session():
        block = cache_a_block(pool)
        ticket = pool.pin([block.block_id])
    memory.sleep()
    assert arena.is_mapped(LAYOUT.page_of(block.block_id))
    pool.memory.unpin(ticket)
    assert memory.mapped_bytes == 0
    memory.wake()
    with pool.session():
        assert find(pool, 1) is None


def test_evicted_block_may_be_named_in_a_pin() -> None:
    """A request that was preempted names blocks that it had, outside of any session."""
    _, memory = make_memory()
    pool = make_pool(memory)
    with pool.session():
        block = cache_a_block(pool)
    memory.sleep()  # evicts it, which nobody has followed yet
    pool.memory.unpin(pool.pin([block.block_id, 0]))
    memory.wake()
    pool.check_integrity()


def test_tail_of_a_request_is_evicted_first() -> None:
    _, memory = make_memory(max_cached_blocks=4)
    pool = make_pool(memory)
    with pool.session():
        blocks = pool.get_new_blocks(6)
    for number, block in enumerate(blocks):
        pool._insert_block_hash(key_of(number), block, num_tokens=32)
    pool.free_blocks(reversed(blocks))
    with pool.session():
        assert [find(pool, number) is not None for number in range(6)] == [True] * 4 + [False] * 2


def test_without_prefix_caching_nothing_is_cached() -> None:
    _, memory = make_memory()
    pool = make_pool(memory, enable_caching=False)
    with pool.session():
        pool.free_blocks(pool.get_new_blocks(5))
        assert pool.blocks.ids() == [0]
        assert memory.stats()["blocks_cached"] == 0


def test_unpinning_for_a_reader_is_refused() -> None:
    pool = make_pool(make_memory()[1])
    with pool.session():
        blocks = pool.get_new_blocks(1)
        with pytest.raises(UnsupportedEngineError):
            pool.unpin_blocks(blocks, lambda _: None)
    assert blocks[0].ref_cnt == 1


def test_block_outside_the_pool_is_named() -> None:
    _, memory = make_memory()
    pool = make_pool(memory)
    with pytest.raises(ValueError, match=str(len(pool.blocks))):
        pool.evict_blocks({len(pool.blocks)})
    with pool.session():
        block = cache_a_block(pool)
    with pytest.raises(ValueError, match="outside"):
        pool.evict_blocks([block.block_id, len(pool.blocks)])
    with pool.session():
        assert find(pool, 1) is block, "refused, it drops nothing"
    with pytest.raises(IndexError, match="neither in use nor cached"):
        pool.blocks[5]
