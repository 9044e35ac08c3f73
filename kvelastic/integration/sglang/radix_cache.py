"""SGLang's radix cache, from which the pool may evict blocks that no request has locked.

The tree is SGLang's own Python implementation, which SGLang uses if a component is replaced. This
module reports four events of a node to `tree_blocks`: locked, unlocked, split, evicted. Nodes that
the pool has evicted are cut out before the tree is read::

    match_prefix, checkpoint:  session | follow | SGLang's own ........ |
    a round's schedule:        session | follow | SGLang's own | settle |

So a lookup finds only blocks with memory, and none of them can be evicted between lookup and lock.

Imports SGLang, so only its scheduler's process may import this module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvelastic.integration.sglang.tree_blocks import TreeBlocks

if TYPE_CHECKING:
    from kvelastic.integration.sglang.allocator import ElasticPagedAllocator
    from kvelastic.integration.sglang.prefix_loads import PrefixLoads
    from kvelastic.pool.scheduling.blocks import Changes


class ElasticFullComponent(FullComponent):  # type: ignore[misc]  # SGLang is untyped here
    """The tree's full-attention blocks; reports each node's events to `TreeBlocks`."""

    cache: ElasticRadixCache

    def acquire_component_lock(self, node: Any, result: Any, lock_host: bool = False) -> Any:
        """A request locks the path up to the root."""
        if not lock_host:
            for each in self._path(node):
                self.cache.tree_blocks.locked(each)
        return super().acquire_component_lock(node, result, lock_host)

    def release_component_lock(self, node: Any, params: Any, lock_host: bool = False) -> None:
        """A request unlocks the path up to the root."""
        super().release_component_lock(node, params, lock_host)
        if not lock_host:
            for each in self._path(node):
                if each.component_data[self.component_type].lock_ref == 0:
                    self.cache.tree_blocks.unlocked(each)

    def redistribute_on_node_split(self, new_parent: Any, child: Any) -> None:
        """Two prompts differ in the middle of a node: it is split."""
        super().redistribute_on_node_split(new_parent, child)
        self.cache.tree_blocks.split(new_parent, child, len(new_parent.key) // self.cache.page_size)

    def evict_component(self, node: Any, device_frees: Any, *args: Any, **more: Any) -> Any:
        """The tree evicts a node. `TreeBlocks` takes its blocks instead of SGLang's lists."""
        given_up: dict[Any, list[Any]] = defaultdict(list)
        freed = super().evict_component(node, given_up, *args, **more)
        if given_up.get(self.component_type):
            self.cache.tree_blocks.evicted(node)
        return freed

    def _path(self, node: Any) -> Iterator[Any]:
        root = self.tree_core.root_node
        while node is not root:
            yield node
            node = node.parent


class ElasticRadixCache(UnifiedRadixCache):  # type: ignore[misc]  # SGLang is untyped here
    """Replaces SGLang's radix cache; its methods have the same meaning."""

    page_size: int
    checks_integrity = False
    """True to check `tree_blocks` in every leak check of SGLang."""

    def __init__(self, params: Any) -> None:
        """Register with `params`' `ElasticPagedAllocator`."""
        allocator: ElasticPagedAllocator = params.token_to_kv_pool_allocator
        self.blocks = allocator.blocks
        self.tree_blocks: TreeBlocks[Any] = TreeBlocks(self.blocks, self._ids_of)
        self.prefix_loads: PrefixLoads | None = None
        """Loads from tiers, or None without tiers."""
        super().__init__(params)
        allocator.radix_cache = self
        self.blocks.on_changes = self._follow

    def _ids_of(self, node: Any) -> list[int]:
        slots = node.component_data[ComponentType.FULL].value
        ids: list[int] = (slots[:: self.page_size] // self.page_size).tolist()
        return ids

    def _follow(self, changes: Changes) -> None:
        """Cut out what the pool has evicted. Call in a session."""
        for node, first in self.tree_blocks.take_holes(changes):
            if self.tree_blocks.is_cached(node):  # else cut with an ancestor
                self._cut(node, first)
        self.tree_blocks.end_holes()

    def _cut(self, node: Any, first: int) -> None:
        """Remove a node's blocks from index `first` on, and its descendants, from the tree."""
        if first:
            self.tree_core._split_node(node.key, node, first * self.page_size)
        below = [node]
        for each in below:
            below.extend(each.children.values())
        for each in reversed(below):
            self._apply_eviction_result(self.tree_core.evict_device_leaf(each.id, False))

    def settle(self) -> None:
        """Cache unlocked blocks in the pool, and apply its evictions."""
        with self.blocks.session():
            self.tree_blocks.settle()
            self.blocks.follow()

    # --- SGLang's calls ------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """Return the longest cached prefix."""
        with self.blocks.session():
            return super().match_prefix(params)

    def checkpoint(self, req: Any, *, up_to: int, **more: Any) -> None:
        """Insert a request's tokens into the tree."""
        with self.blocks.session():
            super().checkpoint(req, up_to=up_to, **more)

    def reset(self) -> None:
        """Empty the tree. SGLang clears the allocator afterwards."""
        if self.prefix_loads is not None:
            self.prefix_loads.reset()
        super().reset()
        self.tree_blocks.clear()
