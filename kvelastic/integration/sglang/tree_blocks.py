"""Tracks which blocks of the pool SGLang's radix cache holds, and which the pool may evict.

A tree node that no request has locked is *cached* in the pool too. The pool may demote it, or evict
it for other instances or a lower limit, by whole pages, the cheapest first. Evicted blocks leave a
*hole*; the tree is cut there before it is read again.

               unlocked            settle()
    in use  ------------> let go -----------> cached ------> hole   evicted by the pool: cut
       ^--- locked ---------'-------------------'  '-------> spare  evicted by the tree
       ^--- adopt(): its prompt came again ---------------------'

A *spare* block is cached in the pool under its key but belongs to no tree node. With tiers, blocks
have keys: a block that the tree evicts stays until the pool needs room, and is copied first.
Without keys it could not be found again, so it becomes free.

    tree_blocks.unlocked(node); tree_blocks.settle()
    for node, first in tree_blocks.take_holes(changes): ...     # cut the tree there
    tree_blocks.end_holes()

Nodes may be of any hashable type. A node that is let go or cached has `lock_ref == 0`, and no
locked node lies below an unlocked one. Used by the scheduler's thread only, in a session of the
pool except for `unlocked`. Imports no SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvelastic.errors import IntegrityError
from kvelastic.pool.scheduling.blocks import Changes, SchedulerBlocks
from kvelastic.tiers.base import each_key

Node = TypeVar("Node", bound=Hashable)


class TreeBlocks(Generic[Node]):
    """The state of the radix cache's blocks."""

    def __init__(self, blocks: SchedulerBlocks, ids_of: Callable[[Node], list[int]]) -> None:
        """`ids_of` returns the blocks of a node in token order."""
        self._blocks = blocks
        self._ids_of = ids_of
        self.keys_of: Callable[[Node], bytes] | None = None
        """Returns the keys of a node's blocks, 16 bytes each; None: blocks have no keys."""
        self._let_go: dict[Node, None] = {}
        """In the order in which they were unlocked; within a path, descendants first."""
        self._cached: dict[Node, list[int]] = {}
        self._node_of: dict[int, Node] = {}
        """Nodes by block, for every block that is cached for the tree."""
        self._gone: set[int] = set()
        """Blocks evicted by the pool, until the tree is cut."""
        self._spare: dict[bytes, int] = {}
        self._spare_key: dict[int, bytes] = {}

    @property
    def cached(self) -> int:
        """Blocks of the tree that are cached in the pool."""
        return len(self._node_of)

    def is_cached(self, node: Node) -> bool:
        """Return True if the pool may evict the node's blocks."""
        return node in self._cached

    # --- what requests do ----------------------------------------------------------------------

    def unlocked(self, node: Node) -> None:
        """No request uses the node now."""
        if node not in self._cached:
            self._let_go[node] = None

    def locked(self, node: Node) -> None:
        """A request uses the node: its blocks stay. The tree must have no holes."""
        if node in self._let_go:
            del self._let_go[node]
        elif node in self._cached:
            ids = self._cached[node]
            self._blocks.touch(ids)
            self._drop(node)

    def split(self, upper: Node, lower: Node, blocks: int) -> None:
        """The first `blocks` blocks of `lower` move to `upper`, a new node above it."""
        if lower in self._let_go:
            self._let_go[upper] = None
        elif lower in self._cached:
            ids = self._cached[lower]
            self._cached[upper], self._cached[lower] = ids[:blocks], ids[blocks:]
            for block in self._cached[upper]:
                if block in self._node_of:
                    self._node_of[block] = upper

    # --- what the tree and the pool do ---------------------------------------------------------

    def settle(self) -> None:
        """Cache unlocked nodes; ends of prompts will be evicted before their beginnings."""
        if not self._let_go:
            return
        nodes = list(self._let_go)
        taken: list[list[int]] = []
        ids: list[int] = []
        keys: list[bytes] = []
        for node in nodes:
            own = self._ids_of(node)
            taken.append(own)
            ids += reversed(own)
            if self.keys_of is not None:
                keys += reversed(each_key(self.keys_of(node)))
        self._blocks.give_back([], ids, b"".join(keys) if self.keys_of is not None else None)
        for node, own in zip(nodes, taken, strict=True):
            self._cached[node] = own
            self._node_of.update(dict.fromkeys(own, node))
        self._let_go.clear()

    def evicted(self, node: Node) -> None:
        """The tree evicts an unlocked node."""
        keys = None if self.keys_of is None else each_key(self.keys_of(node))
        if node in self._cached:
            ids = self._cached[node]
            self._drop(node)
            if keys is None:
                self._blocks.drop([block for block in ids if block not in self._gone])
                return
        else:
            ids = self._ids_of(node)
            self._let_go.pop(node, None)
            if keys is None:
                self._blocks.give_back(ids)
                return
            doubles = [block for block, key in zip(ids, keys, strict=True) if key in self._spare]
            others = [pair for pair in zip(ids, keys, strict=True) if pair[1] not in self._spare]
            others.reverse()
            self._blocks.give_back(
                doubles, [block for block, _ in others], b"".join(key for _, key in others)
            )
        # A cached double belongs to no node and is not spare: the pool may have evicted it already.
        for block, key in zip(ids, keys, strict=True):
            if block not in self._gone and key not in self._spare:
                self._spare[key], self._spare_key[block] = block, key

    def adopt(self, keys: bytes) -> list[int]:
        """Take the spare blocks of the leading keys; the caller uses them from now on."""
        ids = []
        for key in each_key(keys):
            if key not in self._spare:
                break
            ids.append(self._spare[key])
        if ids:
            self._blocks.touch(ids)
            for block in ids:
                del self._spare[self._spare_key.pop(block)]
        return ids

    def take_holes(self, changes: Changes) -> list[tuple[Node, int]]:
        """Return the nodes with evicted blocks, each with the index of its first evicted block."""
        holes: dict[Node, None] = {}
        for block, _ in changes:
            node = self._node_of.pop(block, None)
            if node is not None:
                self._gone.add(block)
                holes[node] = None
            elif block in self._spare_key:
                del self._spare[self._spare_key.pop(block)]
        return [
            (node, next(at for at, block in enumerate(self._cached[node]) if block in self._gone))
            for node in holes
        ]

    def end_holes(self) -> None:
        """The tree was cut at every hole."""
        self._gone.clear()

    def clear(self) -> None:
        """The tree is empty. The caller must clear the pool next."""
        for state in (self._let_go, self._cached, self._node_of, self._spare, self._spare_key):
            state.clear()
        self._gone.clear()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the records of a block disagree."""
        of_nodes = {block: node for node, ids in self._cached.items() for block in ids}
        if {block: of_nodes.get(block) for block in self._node_of} != self._node_of:
            raise IntegrityError("a block of the radix cache is recorded for two nodes")
        missing = of_nodes.keys() - self._node_of.keys() - self._gone
        if missing or self._let_go.keys() & self._cached.keys():
            raise IntegrityError(
                f"the radix cache has {len(missing)} cached blocks without a node, or a node that"
                " is both unlocked and cached"
            )
        if (
            self._spare_key.keys() & self._node_of.keys()
            or {block: key for key, block in self._spare.items()} != self._spare_key
        ):
            raise IntegrityError("a spare block is in the radix cache, or has two keys")

    def _drop(self, node: Node) -> None:
        for block in self._cached.pop(node):
            self._node_of.pop(block, None)
