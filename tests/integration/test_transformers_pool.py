"""transformers' pool of sectors and its record of cached blocks, over a native pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import needs
import pytest
from native_pools import LAYOUTS, Memory

from kvelastic.pool.scheduling.blocks import SchedulerBlocks

if TYPE_CHECKING:
    from kvelastic.integration.transformers.prefix_ledger import PrefixLedger
    from kvelastic.integration.transformers.sector_pool import SectorPool

pytestmark = [pytest.mark.slow, needs.transformers]
LAYOUT = LAYOUTS["paged"]
BLOCKS = LAYOUT.blocks_per_page
HUGE = LAYOUT.page_bytes


class Cache:
    """A pool for one allocator whose blocks are sectors, and its ledger, as a cache has them."""

    def __init__(self, pages: int = 4, **options: Any) -> None:
        from kvelastic.integration.transformers.prefix_ledger import PrefixLedger
        from kvelastic.integration.transformers.sector_pool import SectorPool

        self.memory = Memory(LAYOUT, pages)
        self.native = self.memory.pool(movable=True, **options)
        self.blocks = SchedulerBlocks(self.native)
        self.pool: SectorPool = SectorPool(pages * BLOCKS, 1, self.blocks)
        self.pool.set_blocks_per_sector(0, 1)
        self.ledger: PrefixLedger = PrefixLedger(self.blocks)

    def take(self, count: int) -> list[int]:
        assert self.blocks.prepare(count) == count
        for _ in range(count):
            self.pool.allocate_sector(0)
        taken: list[int] = self.pool.get_free_blocks(0, count)
        return taken

    def complete(self, blocks: list[int]) -> None:
        """A batch has filled these blocks: each has a hash from now on."""
        for block in blocks:
            assert self.ledger.register_new_hash(block, 1000 + block) is None

    def give_back(self, blocks: list[int]) -> None:
        self.pool.free_blocks(0, [block for block in blocks if self.ledger.release(block)])

    def check(self) -> None:
        self.blocks.check_integrity()
        self.ledger.check_integrity()


def test_emptied_sector_is_free_at_once() -> None:
    """transformers returns it with the next schedule, and the page is held until then."""
    cache = Cache()
    blocks = cache.take(BLOCKS + 3)
    cache.native.set_limit(HUGE)
    cache.give_back(blocks)
    assert cache.memory.held_at_the_os() <= HUGE
    assert cache.blocks.used == 0
    cache.check()


def test_blocks_freed_during_a_step_keep_their_contents() -> None:
    cache = Cache()
    blocks = cache.take(2 * BLOCKS)
    for block in blocks:
        cache.memory.write(block, 7)
    cache.native.set_limit(HUGE)
    with cache.blocks.step():
        cache.give_back(blocks)
        assert cache.blocks.used == 0
        assert all(cache.memory.read(block) == {7} for block in blocks)
    assert cache.memory.held_at_the_os() <= HUGE
    cache.check()


def test_during_preemption_only_mapped_blocks_are_free() -> None:
    """Where the driver has no page, another request has to give its blocks up."""
    cache = Cache()
    blocks = cache.take(BLOCKS - 1)
    cache.memory.driver.arm(1, 1000)
    assert cache.blocks.prepare(1) == 0
    assert cache.pool.num_free_sectors > 0, "the limit has room"
    with cache.blocks.step():
        assert cache.pool.num_free_sectors == 0
        cache.give_back(blocks[:2])
        assert cache.pool.num_free_sectors == 2
    assert cache.take(2)
    cache.check()


def test_block_evicted_by_a_limit_is_not_found() -> None:
    cache = Cache()
    blocks = cache.take(2 * BLOCKS)
    cache.complete(blocks)
    cache.give_back(blocks)
    assert len(cache.ledger.cached_blocks) == 2 * BLOCKS
    cache.native.set_limit(HUGE)
    cache.blocks.follow()
    kept = set(cache.ledger.cached_blocks)
    assert 0 < len(kept) < BLOCKS
    assert set(cache.ledger.hash_to_block.values()) == kept
    cache.check()


def test_alloc_of_a_cached_block_removes_its_hash() -> None:
    cache = Cache(pages=1)
    blocks = cache.take(BLOCKS - 1)  # the null block is the eighth
    cache.complete(blocks)
    cache.give_back(blocks)
    (again,) = cache.take(1)
    assert again in blocks
    assert again not in cache.ledger.block_to_hash
    assert 1000 + again not in cache.ledger.hash_to_block
    assert cache.blocks.used == 1
    cache.check()


def test_moved_cached_block_is_found() -> None:
    cache = Cache()
    blocks = cache.take(2 * BLOCKS - 1)
    for block in blocks:
        cache.memory.write(block, block % 250 + 1)
    cache.complete(blocks)
    lonely = max(blocks)  # the only one of its page that stays, so it moves to a hole
    on_its_page = [b for b in blocks if cache.memory.page_of(b) == cache.memory.page_of(lonely)]
    holes = [b for b in blocks if b not in on_its_page][:2]
    dropped = [*on_its_page, *holes]
    dropped.remove(lonely)
    for block in dropped:
        found = cache.ledger.block_to_hash.pop(block)
        del cache.ledger.hash_to_block[found]
    cache.give_back(blocks)
    assert cache.native.compact() == 1
    cache.blocks.follow()
    moved = cache.ledger.hash_to_block[1000 + lonely]
    assert moved in holes
    assert cache.memory.read(moved) == {lonely % 250 + 1}
    cache.ledger.acquire(moved)
    assert cache.blocks.used == 1
    cache.check()


def test_shared_block_is_used_until_its_last_request() -> None:
    cache = Cache()
    (block,) = cache.take(1)
    cache.complete([block])
    cache.ledger.acquire(block)
    cache.give_back([block])
    assert cache.blocks.used == 1
    assert not cache.ledger.cached_blocks
    cache.give_back([block])
    assert (cache.blocks.used, list(cache.ledger.cached_blocks)) == (0, [block])
    cache.ledger.acquire(block)
    assert (cache.blocks.used, list(cache.ledger.cached_blocks)) == (1, [])
    cache.check()


def test_zero_cache_bound_caches_nothing() -> None:
    cache = Cache(max_cached_blocks=0)
    blocks = cache.take(3)
    cache.complete(blocks)
    cache.give_back(blocks)
    assert not cache.ledger.hash_to_block
    cache.check()


def test_trash_sector_is_never_freed() -> None:
    """Requests of a warm-up have it for all of their blocks."""
    cache = Cache()
    cache.give_back([0, 0, 0])
    cache.check()
    assert cache.blocks.used == 0


def test_reset_frees_everything() -> None:
    cache = Cache()
    blocks = cache.take(5)
    cache.complete(blocks[:2])
    cache.give_back(blocks[:2])
    cache.ledger.reset()
    cache.pool.reset()
    assert cache.blocks.used == 0
    assert cache.native.stats()["blocks_cached"] == 0
    assert len(cache.take(3 * BLOCKS)) == 3 * BLOCKS
    cache.check()


def test_integrity_check_detects_a_mismatch() -> None:
    from kvelastic.errors import IntegrityError

    cache = Cache()
    blocks = cache.take(2)
    cache.complete(blocks)
    cache.give_back(blocks)
    cache.native.free(blocks[:1])  # behind the ledger's back
    with pytest.raises(IntegrityError):
        cache.ledger.check_integrity()
    cache.take(1)
    cache.native.alloc(1)
    with pytest.raises(IntegrityError):
        cache.blocks.check_integrity()
