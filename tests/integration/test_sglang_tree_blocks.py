"""Blocks that the radix cache evicts while the pool has evicted others and not reported them."""

from __future__ import annotations

from native_pools import LAYOUTS, Memory

from kvelastic.integration.sglang.tree_blocks import TreeBlocks
from kvelastic.pool.scheduling.blocks import Changes, SchedulerBlocks

A_PAGE = LAYOUTS["paged"].blocks_per_page


class Tree:
    """Nodes by name. Nodes of the same initial have blocks of the same prompt, from its start."""

    def __init__(self, max_cached_blocks: int) -> None:
        self.memory = Memory(LAYOUTS["paged"], 8)
        self.pool = self.memory.pool(max_cached_blocks=max_cached_blocks)
        self.of_pool = SchedulerBlocks(self.pool)
        self.ids: dict[str, list[int]] = {}
        self.blocks: TreeBlocks[str] = TreeBlocks(self.of_pool, lambda node: self.ids[node])
        self.blocks.keys_of = lambda node: b"".join(
            f"{node[0]} {at}".ljust(16).encode() for at in range(len(self.ids[node]))
        )
        self.of_pool.on_changes = self.follow

    def follow(self, changes: Changes) -> None:
        self.blocks.take_holes(changes)
        self.blocks.end_holes()

    def take(self, node: str, count: int) -> None:
        ids = self.of_pool.take(count)
        assert ids is not None
        self.ids[node] = ids

    def check(self) -> None:
        self.of_pool.follow()
        self.blocks.check_integrity()
        self.of_pool.check_integrity()
        self.pool.close(discard=True)


def test_unlocked_double_is_freed_over_the_bound() -> None:
    tree = Tree(max_cached_blocks=4)
    with tree.of_pool.session():
        tree.take("running", 3)
        tree.take("prompt", 4)
        tree.blocks.unlocked("prompt")
        tree.blocks.evicted("prompt")
        tree.take("full page", A_PAGE)
        tree.take("prompt again", 2)
        tree.blocks.unlocked("prompt again")
        tree.blocks.evicted("prompt again")
        assert tree.pool.stats()["blocks_cached"] == 4
        assert tree.of_pool.used == 3 + A_PAGE
        tree.check()


def test_cached_double_may_be_evicted_unreported() -> None:
    tree = Tree(max_cached_blocks=4)
    with tree.of_pool.session():
        tree.take("prompt", 2)
        tree.blocks.unlocked("prompt")
        tree.blocks.evicted("prompt")
        tree.take("prompt again", 2)
        tree.blocks.unlocked("prompt again")
        tree.blocks.settle()
        tree.take("other", 4)
        assert not tree.pool.has_evicted
        tree.blocks.unlocked("other")
        tree.blocks.evicted("other")
        assert tree.pool.has_evicted
        tree.blocks.evicted("prompt again")
        tree.check()
