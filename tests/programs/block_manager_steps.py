"""Random requests over `ElasticBlockManager`, whose limit is lowered and raised meanwhile.

    PYTHONPATH=.venv/transformers-5.17 block_manager_steps.py SEED STEPS

transformers' own allocator and prefix search use the manager, as a cache does. After each step all
books agree, and each block holds what its tokens say, whatever was evicted, moved or shared. Prints
in JSON how often what happened; ends with an error at the first that is wrong.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from types import SimpleNamespace

from native_pools import LAYOUTS, Memory
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_manager import FullAttentionCacheAllocator

from kvelastic.integration.transformers.block_manager import TRASH_BLOCK, ElasticBlockManager
from kvelastic.pool.scheduling.blocks import Changes, SchedulerBlocks

TOKENS = 4
LAYOUT = LAYOUTS["block that divides no page"]
PAGES = 5


class CountingManager(ElasticBlockManager):
    evicted = 0

    def _follow(self, changes: Changes) -> None:
        before = len(self._hash_to_id)
        super()._follow(changes)
        self.evicted += before - len(self._hash_to_id)


class Cache:
    def __init__(self, **options: int) -> None:
        self.memory = Memory(LAYOUT, PAGES)
        self.pool = self.memory.pool(movable=True, **options)
        self.blocks = SchedulerBlocks(self.pool)
        self.manager = CountingManager(PAGES * 16, TOKENS, False, self.blocks)
        self.allocator = FullAttentionCacheAllocator(0, TOKENS, allow_block_sharing=True)
        self.tables: dict[str, list[int]] = self.allocator.block_table
        self.tokens: dict[str, list[int]] = {}
        self.happened: Counter[str] = Counter()
        self._as_cache = SimpleNamespace(
            block_size=TOKENS,
            group_cache_managers=[self.allocator],
            _block_manager=self.manager,
            _total_prefix_length=0,
        )

    def start(self, name: str, tokens: list[int]) -> None:
        """A request whose prompt is computed in one batch."""
        with self.blocks.session():
            found = PagedAttentionCache.search_prefix_match(self._as_cache, name, tokens)
            self.happened["found"] += found // TOKENS
            self.tokens[name] = tokens
            missing = (len(tokens) - found) // TOKENS
            # transformers looks first, and counts on what it saw.
            if self.manager.has_enough_free_blocks(missing):
                assert self.allocator.allocate_blocks(missing, name, self.manager) is not None
            else:
                self.happened["did not fit"] += 1
                self.tokens[name] = tokens[:found]
                if not found:
                    self.tables.setdefault(name, [])
        complete = self.manager._id_to_block
        for at, block in enumerate(self.tables[name]):
            if not complete[block].is_complete:
                self.memory.write(block, self.tag(name, at))
        self.check()
        with self.blocks.session():
            self.manager.mark_shareable_blocks_as_complete(
                len(self.tokens[name]) // TOKENS, self.tables[name], self.tokens[name]
            )

    def grow(self, name: str) -> None:
        """A block for tokens that are to come."""
        with self.blocks.session():
            if self.manager.has_enough_free_blocks(1):
                assert self.allocator.allocate_blocks(1, name, self.manager) == 1
                self.tokens[name] = self.tokens[name] + [self.happened["grew"] + 100] * TOKENS
                self.happened["grew"] += 1
                last = len(self.tables[name]) - 1
                self.memory.write(self.tables[name][last], self.tag(name, last))

    def fork(self, name: str, child: str) -> None:
        with self.blocks.session():
            self.manager.children = {name: 2}
            fitting = self.manager.forks_that_fit(name, [self.allocator])
            if fitting is None or fitting >= 2:
                children = [child, f"{child}'"]
                pairs = self.allocator.fork_blocks(name, children, self.manager)
                for source, target in zip(*pairs, strict=True):
                    (tag,) = self.memory.read(source)
                    self.memory.write(target, tag)
                for each in children:
                    self.tokens[each] = self.tokens[name]
                self.happened["forked"] += 1

    def end(self, name: str) -> None:
        self.allocator.free_blocks(name, self.manager)
        del self.tokens[name]

    def tag(self, name: str, at: int) -> int:
        return hash(tuple(self.tokens[name][: (at + 1) * TOKENS])) % 251 + 1

    def check(self) -> None:
        self.manager.check_integrity()
        for name, table in self.tables.items():
            assert TRASH_BLOCK not in table
            for at, block in enumerate(table):
                assert self.memory.read(block) == {self.tag(name, at)}, (name, at, block)


def run(seed: int, steps: int) -> Counter[str]:
    pick = random.Random(seed)
    cache = Cache(max_cached_blocks=pick.choice((-1, 12)))
    for step in range(steps):
        name = pick.choice(sorted(cache.tables)) if cache.tables else ""
        do = pick.choice(("start", "start", "grow", "fork", "end", "end", "limit", "compact"))
        if do == "start":
            # Few different tokens: prompts begin alike, and blocks turn out to be duplicates.
            blocks = [pick.randrange(2) for _ in range(pick.randrange(2, 9))]
            tokens = [token for token in blocks for _ in range(TOKENS)]
            cache.start(f"r{step}", tokens)
        elif do == "limit":
            cache.pool.set_limit(pick.randrange(1, PAGES + 1) * LAYOUT.page_bytes)
        elif do == "compact":
            cache.pool.compact()
        elif name and do == "grow":
            cache.grow(name)
        elif name and do == "fork":
            cache.fork(name, f"f{step}")
        elif name and do == "end":
            cache.end(name)
        cache.check()
    for name in list(cache.tables):
        cache.end(name)
    cache.pool.sleep()
    cache.blocks.follow()
    cache.check()
    assert not cache.manager._hash_to_id
    assert not cache.manager._id_to_block
    assert cache.memory.held_at_the_os() == 0
    cache.happened["evicted"] = cache.manager.evicted
    return cache.happened


def prefix_keeps_its_head() -> None:
    """Of five blocks two stay cached: they are of use only if they are the first two."""
    cache = Cache(max_cached_blocks=2)
    prompt = list(range(5 * TOKENS))
    cache.start("one", prompt)
    cache.end("one")
    cache.start("other", prompt)
    assert cache.happened["found"] == 2, cache.happened


def moved_block_is_found() -> None:
    """The only block of its page moves to a hole of another one, and its prefix with it."""
    cache = Cache()
    cache.start("filler", [])
    for _ in range(LAYOUT.blocks_per_page - 2):
        cache.grow("filler")
    cache.start("anchor", [1] * TOKENS)
    prompt = [2] * TOKENS
    cache.start("lonely", prompt)
    (block,) = cache.tables["lonely"]
    assert cache.memory.page_of(block) != cache.memory.page_of(cache.tables["anchor"][0])
    cache.end("filler")
    cache.end("lonely")
    assert cache.pool.compact() == 1
    cache.start("other", prompt)
    assert cache.happened["found"] == 1
    assert cache.tables["other"] != [block]
    cache.check()


if __name__ == "__main__":
    prefix_keeps_its_head()
    moved_block_is_found()
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
