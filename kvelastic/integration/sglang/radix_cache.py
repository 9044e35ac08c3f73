"""SGLang's radix cache, whose blocks the pool may take while no request has them locked.

The tree is SGLang's own, in Python: SGLang takes that one wherever a component is not its own. What
`tree_blocks` is told here are the four things that happen to a node: it is locked, unlocked, split,
evicted. What the pool has evicted is cut out before the tree is looked at::

    match_prefix, checkpoint:  session | follow | SGLang's own ........ |
    a round's schedule:        session | follow | SGLang's own | settle |

so nothing is found that has no memory, and between looking a prefix up and locking it nothing of it
can go.

Imports SGLang: only what runs in its scheduler's process may import this module.
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
    from kvelastic.scheduling.blocks import Changes


class ElasticFullComponent(FullComponent):  # type: ignore[misc]  # SGLang is untyped here
    """The tree's blocks with full attention: tells `TreeBlocks` what happens to each node."""

    cache: ElasticRadixCache

    def acquire_component_lock(self, node: Any, result: Any, lock_host: bool = False) -> Any:
        """A request locks the path up to the root."""
        if not lock_host:
            for each in self._path(node):
                self.cache.tree_blocks.locked(each)
        return super().acquire_component_lock(node, result, lock_host)

    def release_component_lock(self, node: Any, params: Any, lock_host: bool = False) -> None:
        """A request lets go of the path up to the root."""
        super().release_component_lock(node, params, lock_host)
        if not lock_host:
            for each in self._path(node):
                if each.component_data[self.component_type].lock_ref == 0:
                    self.cache.tree_blocks.unlocked(each)

    def redistribute_on_node_split(self, new_parent: Any, child: Any) -> None:
        """A prompt leaves another one in the middle of a node."""
        super().redistribute_on_node_split(new_parent, child)
        self.cache.tree_blocks.split(new_parent, child, len(new_parent.key) // self.cache.page_size)

    def evict_component(self, node: Any, device_frees: Any, *args: Any, **more: Any) -> Any:
        """The tree gives a node up; its blocks go another way than through SGLang's lists."""
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
    """Takes the place of SGLang's radix cache; the same calls, the same meanings."""

    page_size: int
    checks_integrity = False
    """Whether `tree_blocks` is checked wherever SGLang looks for leaks."""

    def __init__(self, params: Any) -> None:
        """As SGLang's own. `params` has an `ElasticPagedAllocator`, which knows this from now."""
        allocator: ElasticPagedAllocator = params.token_to_kv_pool_allocator
        self.blocks = allocator.blocks
        self.tree_blocks: TreeBlocks[Any] = TreeBlocks(self.blocks, self._ids_of)
        self.prefix_loads: PrefixLoads | None = None
        """What comes back from tiers; None: there are none."""
        super().__init__(params)
        allocator.radix_cache = self
        self.blocks.on_changes = self._follow

    def _ids_of(self, node: Any) -> list[int]:
        slots = node.component_data[ComponentType.FULL].value
        ids: list[int] = (slots[:: self.page_size] // self.page_size).tolist()
        return ids

    def _follow(self, changes: Changes) -> None:
        """Cut out what the pool has evicted. In a session."""
        for node, first in self.tree_blocks.take_holes(changes):
            if self.tree_blocks.is_cached(node):  # not gone with one above it
                self._cut(node, first)
        self.tree_blocks.end_holes()

    def _cut(self, node: Any, first: int) -> None:
        """Take the blocks from the `first` on out of the tree, and all that continues them."""
        if first:
            self.tree_core._split_node(node.key, node, first * self.page_size)
        below = [node]
        for each in below:
            below.extend(each.children.values())
        for each in reversed(below):
            self._apply_eviction_result(self.tree_core.evict_device_leaf(each.id, False))

    def settle(self) -> None:
        """Let the pool have what requests have let go, and follow what it takes of that."""
        with self.blocks.session():
            self.tree_blocks.settle()
            self.blocks.follow()

    # --- SGLang's calls ------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """The longest prefix that is there."""
        with self.blocks.session():
            return super().match_prefix(params)

    def checkpoint(self, req: Any, *, up_to: int, **more: Any) -> None:
        """A request's tokens become the tree's."""
        with self.blocks.session():
            super().checkpoint(req, up_to=up_to, **more)

    def reset(self) -> None:
        """Forget everything. The allocator is cleared after this."""
        if self.prefix_loads is not None:
            self.prefix_loads.reset()
        super().reset()
        self.tree_blocks.clear()
