"""Random requests over a radix tree whose blocks a real pool takes: whoever locks a path has it.

The tree is a small one of its own, with what SGLang's has: nodes are locked up to the root, split,
and evicted as leaves. Every block's bytes say whose it is.
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
from native_pools import LAYOUTS, Memory

from kvelastic.integration.sglang.tree_blocks import TreeBlocks
from kvelastic.pool.scheduling.blocks import Changes, SchedulerBlocks

pytestmark = pytest.mark.slow


PAGES = 4


class Node:
    """Blocks of one prompt or of several, from `depth` on."""

    def __init__(self, parent: Node | None, ids: list[int], tags: list[int]) -> None:
        self.parent = parent
        self.children: list[Node] = []
        self.ids = ids
        self.tags = tags
        """What each block's bytes say."""
        self.locks = 0

    def path(self) -> list[Node]:
        """Up to the root, without it."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes

    def all_below(self) -> list[Node]:
        nodes = [self]
        for node in nodes:
            nodes.extend(node.children)
        return nodes


def keys_of(node: Node) -> bytes:
    return b"".join(tag.to_bytes(16, "little") for tag in node.tags)


class RadixTree(RuleBasedStateMachine):
    has_keys = False

    @initialize()
    def make(self) -> None:
        self.memory = Memory(LAYOUTS["paged"], PAGES)
        self.pool = self.memory.pool(max_blocks=PAGES * 8 - 1)
        self.of_pool = SchedulerBlocks(self.pool)
        self.of_pool.on_changes = self.follow
        self.blocks: TreeBlocks[Node] = TreeBlocks(self.of_pool, lambda node: node.ids)
        if self.has_keys:
            self.blocks.keys_of = keys_of
        self.root = Node(None, [], [])
        self.locked: list[Node] = []
        """The end of each request's path."""
        self.tag = 0
        self.of_tag: dict[int, int] = {}
        """What each tag's bytes are: a number of 1 to 250."""

    # --- what SGLang does ------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        return self.root.all_below()[1:]

    def follow(self, changes: Changes) -> None:
        for node, first in self.blocks.take_holes(changes):
            if not self.blocks.is_cached(node):
                continue
            if first:
                self.split(node, first)
            for each in reversed(node.all_below()):
                self.evict(each)
        self.blocks.end_holes()

    def split(self, node: Node, at: int) -> None:
        assert node.parent is not None
        upper = Node(node.parent, node.ids[:at], node.tags[:at])
        node.parent.children.remove(node)
        node.parent.children.append(upper)
        upper.children, node.parent = [node], upper
        upper.locks = node.locks
        node.ids, node.tags = node.ids[at:], node.tags[at:]
        self.blocks.split(upper, node, at)

    def evict(self, node: Node) -> None:
        assert not node.children
        assert node.locks == 0, "a locked node was taken"
        self.blocks.evicted(node)
        assert node.parent is not None
        node.parent.children.remove(node)

    def lock(self, node: Node) -> None:
        for each in node.path():
            if each.locks == 0:
                self.blocks.locked(each)
            each.locks += 1
            for block, tag in zip(each.ids, each.tags, strict=True):
                assert self.memory.read(block) == {self.of_tag[tag]}, "another's bytes"
        self.locked.append(node)

    # --- rules -----------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 9), at=st.integers(1, 8))
    def start_request(self, data: st.DataObject, count: int, at: int) -> None:
        with self.of_pool.session():
            above = data.draw(st.sampled_from(range(len(self.nodes()) + 1)), label="above")
            parent = self.root.all_below()[above]
            if len(parent.ids) > at:  # it leaves the prompt in the middle
                self.split(parent, at)
                assert parent.parent is not None
                parent = parent.parent
            self.lock(parent)
            ids = self.of_pool.take(count)
            if ids is None:
                return
            tags = []
            for block in ids:
                self.tag += 1
                self.of_tag[self.tag] = self.tag % 250 + 1
                self.memory.write(block, self.of_tag[self.tag])
                tags.append(self.tag)
            node = Node(parent, ids, tags)
            parent.children.append(node)
            self.unlock(self.locked.pop())
            self.lock(node)

    def unlock(self, node: Node) -> None:
        for each in node.path():
            each.locks -= 1
            if each.locks == 0:
                self.blocks.unlocked(each)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(range(len(self.locked))))
        self.unlock(self.locked.pop(at))

    @precondition(lambda self: self.locked)
    @rule()
    def end_all_requests(self) -> None:
        while self.locked:
            self.unlock(self.locked.pop())
        self.settle()

    @rule()
    def settle(self) -> None:
        with self.of_pool.session():
            self.blocks.settle()

    @rule(data=st.data())
    def evict_leaf(self, data: st.DataObject) -> None:
        with self.of_pool.session():
            leaves = [node for node in self.nodes() if not node.children and node.locks == 0]
            if leaves:
                self.evict(data.draw(st.sampled_from(leaves)))

    @precondition(lambda self: self.has_keys)
    @rule(data=st.data())
    def adopt_cached_prefix(self, data: st.DataObject) -> None:
        if not self.tag:
            return
        first = data.draw(st.integers(1, self.tag))
        with self.of_pool.session():
            tags = list(range(first, min(first + 4, self.tag + 1)))
            ids = self.blocks.adopt(b"".join(tag.to_bytes(16, "little") for tag in tags))
            for block, tag in zip(ids, tags, strict=False):
                assert self.memory.read(block) == {self.of_tag[tag]}, "another's bytes"
            self.of_pool.give_back(ids)

    @rule(pages=st.integers(0, PAGES + 1))
    def limit(self, pages: int) -> None:
        self.pool.set_limit(pages * self.memory.layout.page_bytes)

    @rule()
    def flush(self) -> None:
        if not self.locked:
            self.root = Node(None, [], [])
            self.blocks.clear()
            self.of_pool.clear()

    @invariant()
    def integrity_holds(self) -> None:
        if hasattr(self, "pool"):
            self.blocks.check_integrity()
            self.of_pool.check_integrity()
            held = sum(len(node.ids) for node in self.nodes() if not self.blocks.is_cached(node))
            assert self.of_pool.used == held, "a block is of nobody"

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close(discard=True)


@pytest.mark.parametrize("has_keys", [False, True], ids=["no keys", "keys"])
def test_random_requests_over_a_tree(has_keys: bool) -> None:
    run_state_machine_as_test(
        type("Machine", (RadixTree,), {"has_keys": has_keys}),
        settings=settings(
            max_examples=80,
            stateful_step_count=80,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
