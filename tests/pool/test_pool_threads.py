"""Many threads on one pool: no block is handed out twice, nothing waits for ever, books balance."""

from __future__ import annotations

import random
import threading
import time

import pytest
from native_pools import LAYOUTS, Memory

from kvelastic import errors

pytestmark = pytest.mark.slow


PAGES = 10
SECONDS = 2.0
LEAST_TURNS = 6
"""Of each thread, however busy the machine is."""


class Busy:
    """One thread's share: it marks its blocks and finds its mark when it gives them back."""

    def __init__(self, memory, pool, seed, wrong):
        self.memory, self.pool, self.wrong = memory, pool, wrong
        self.random = random.Random(seed)
        self.tag = seed + 1
        self.used = []
        self.turns = 0

    def give_back(self, count):
        self.random.shuffle(self.used)
        ids, self.used = self.used[:count], self.used[count:]
        for block in ids:
            seen = self.memory.read(block)
            if seen != {self.tag}:
                self.wrong.append(f"block {block} of {self.tag} holds {seen}")
        if self.random.random() < 0.4:
            self.pool.cache(ids)
            # It may be evicted, and another's, by now.
            if self.random.random() < 0.5:
                try:
                    self.pool.touch(ids)
                except errors.DoubleFreeError:
                    return
                # Between the two another may have had them, and cached them too: free means
                # nothing then, so a thread that touches must be the only one to cache.
                self.pool.free(ids)
        else:
            self.pool.free(ids)

    def run(self, until):
        try:
            while time.monotonic() < until or self.turns <= LEAST_TURNS:
                self.turns += 1
                ids = self.pool.alloc(self.random.randint(1, 20))
                for block in ids or ():
                    self.memory.write(block, self.tag)
                self.used += ids or []
                if ids is None or self.random.random() < 0.5:
                    self.give_back(self.random.randint(1, 30))
                if self.random.random() < 0.05:
                    self.pool.ensure(self.random.randint(1, 60))
            self.give_back(len(self.used))
        except Exception as error:
            self.wrong.append(error)


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_block_is_handed_out_twice(name):
    memory = Memory(LAYOUTS[name], PAGES)
    page_bytes = memory.layout.page_bytes
    pool = memory.pool(max_cached_blocks=60)
    wrong = []
    until = time.monotonic() + SECONDS
    shares = [Busy(memory, pool, seed, wrong) for seed in range(4)]
    threads = [threading.Thread(target=share.run, args=(until,)) for share in shares]

    def disturb(call, arguments):
        chance = random.Random(9)
        try:
            while time.monotonic() < until:
                call(*arguments(chance))
        except Exception as error:
            wrong.append(error)

    threads += [
        threading.Thread(target=disturb, args=(pool.trim, lambda _: ())),
        threading.Thread(
            target=disturb, args=(pool.set_limit, lambda c: (c.randint(1, PAGES) * page_bytes,))
        ),
        threading.Thread(target=disturb, args=(pool.take_changes, lambda _: ())),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    pool.set_limit(PAGES * page_bytes)
    pool.check_integrity()
    memory.range.check_integrity()
    stats = pool.stats()
    assert stats["blocks_used"] == 0
    assert stats["pages_mapped"] == memory.range.mapped_pages
    assert pool.mapped_bytes == memory.range.held_bytes == memory.held_at_the_os()
    pool.clear()
    everything = pool.alloc(pool.available_size())
    assert len(set(everything)) == PAGES * memory.layout.blocks_per_page - 1
