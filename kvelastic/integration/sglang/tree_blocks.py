"""Which blocks of the pool SGLang's radix cache holds, and whether they may be taken from it.

A node of the tree that no request has locked is *cached* in the pool, too: there it can be demoted,
and taken for other instances or for a lower limit, by whole pages and the cheapest first. What the
pool has taken leaves a *hole*, and the tree is cut there before anybody looks at it again.

               unlocked            settle()
    in use  ------------> let go -----------> cached ------> hole   evicted by the pool: cut
       ^--- locked ---------'-------------------'  '-------> spare  evicted by the tree
       ^--- adopt(): its prompt came again ---------------------'

A *spare* block is cached in the pool under its key and hangs in no tree: where tiers give blocks
their keys, what the tree gives up stays until the pool needs room, and is copied before it goes.
Without keys nobody could find it again, so it is free.

    tree_blocks.unlocked(node); tree_blocks.settle()
    for node, first in tree_blocks.take_holes(changes): ...     # cut the tree there
    tree_blocks.end_holes()

Nodes are anything hashable with `lock_ref == 0` as long as they are let go or cached; no node that
is locked is below one that is not. Used by the scheduler's thread only, in a session of the pool
but for `unlocked`. Imports no SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvelastic.errors import IntegrityError
from kvelastic.scheduling.blocks import Changes, SchedulerBlocks
from kvelastic.tiers.base import KEY_BYTES

Node = TypeVar("Node", bound=Hashable)


class TreeBlocks(Generic[Node]):
    """See the module."""

    def __init__(self, blocks: SchedulerBlocks, ids_of: Callable[[Node], list[int]]) -> None:
        """`ids_of` answers the blocks of a node, in the order of their tokens."""
        self._blocks = blocks
        self._ids_of = ids_of
        self.keys_of: Callable[[Node], bytes] | None = None
        """The keys of a node's blocks, 16 bytes each; None: blocks have no keys."""
        self._let_go: dict[Node, None] = {}
        """In the order in which they were unlocked, of one path the lowest first."""
        self._cached: dict[Node, list[int]] = {}
        self._node_of: dict[int, Node] = {}
        """Of every block that is cached for the tree."""
        self._gone: set[int] = set()
        """Evicted by the pool, and in the tree until it is cut."""
        self._spare: dict[bytes, int] = {}
        self._spare_key: dict[int, bytes] = {}

    @property
    def cached(self) -> int:
        """Blocks of the tree that are cached in the pool."""
        return len(self._node_of)

    def is_cached(self, node: Node) -> bool:
        """Whether the pool may take its blocks."""
        return node in self._cached

    # --- what requests do ----------------------------------------------------------------------

    def unlocked(self, node: Node) -> None:
        """No request needs it any more."""
        if node not in self._cached:
            self._let_go[node] = None

    def locked(self, node: Node) -> None:
        """A request needs it: its blocks stay. Pre: the tree has no holes."""
        if node in self._let_go:
            del self._let_go[node]
        elif node in self._cached:
            ids = self._cached[node]
            self._blocks.touch(ids)
            self._drop(node)

    def split(self, upper: Node, lower: Node, blocks: int) -> None:
        """The first `blocks` blocks of `lower` are those of a new node above it."""
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
        """Cache what was let go, ends of prompts to be evicted before their beginnings."""
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
                keys += reversed(_keys(self.keys_of(node)))
        self._blocks.give_back([], ids, b"".join(keys) if self.keys_of is not None else None)
        for node, own in zip(nodes, taken, strict=True):
            self._cached[node] = own
            self._node_of.update(dict.fromkeys(own, node))
        self._let_go.clear()

    def evicted(self, node: Node) -> None:
        """The tree gives a node up that nobody has locked."""
        keys = None if self.keys_of is None else _keys(self.keys_of(node))
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
            self._blocks.give_back([], ids[::-1], b"".join(keys[::-1]))
        doubles = []
        for block, key in zip(ids, keys, strict=True):
            if block in self._gone:
                continue
            if key in self._spare:
                doubles.append(block)
            else:
                self._spare[key], self._spare_key[block] = block, key
        self._blocks.drop(doubles)

    def adopt(self, keys: bytes) -> list[int]:
        """The spare blocks of the leading keys, which are in use by the caller now."""
        ids = []
        for key in _keys(keys):
            if key not in self._spare:
                break
            ids.append(self._spare[key])
        if ids:
            self._blocks.touch(ids)
            for block in ids:
                del self._spare[self._spare_key.pop(block)]
        return ids

    def take_holes(self, changes: Changes) -> list[tuple[Node, int]]:
        """Nodes of which the pool has taken blocks, and the first block that is gone of each."""
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
        """The tree was cut wherever there was a hole."""
        self._gone.clear()

    def clear(self) -> None:
        """The tree is empty: what the pool has of it is of nobody until it is cleared."""
        for state in (self._let_go, self._cached, self._node_of, self._spare, self._spare_key):
            state.clear()
        self._gone.clear()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if what is known of a block disagrees."""
        of_nodes = {block: node for node, ids in self._cached.items() for block in ids}
        if {block: of_nodes.get(block) for block in self._node_of} != self._node_of:
            raise IntegrityError("a block of the radix cache is said to be of another node")
        missing = of_nodes.keys() - self._node_of.keys() - self._gone
        if missing or self._let_go.keys() & self._cached.keys():
            raise IntegrityError(
                f"the radix cache has {len(missing)} cached blocks that are of no node, or a node"
                " that is both let go and cached"
            )
        if (
            self._spare_key.keys() & self._node_of.keys()
            or {block: key for key, block in self._spare.items()} != self._spare_key
        ):
            raise IntegrityError("a spare block is in the radix cache, or has two keys")

    def _drop(self, node: Node) -> None:
        for block in self._cached.pop(node):
            self._node_of.pop(block, None)


def _keys(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
