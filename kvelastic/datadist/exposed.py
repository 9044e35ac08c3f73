"""Memory of this cluster that peers can access: pools of allocated caches, registered tensors.

A pool of caches is exposed once as a whole; each copy pins the blocks it uses. If registered
tensors are in a caller's elastic pool, that pool is exposed while one of them is registered. Other
memory of the caller is exposed directly. A copy's claim names the cache that the peer intends to
access.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack

from kvelastic.datadist import wire
from kvelastic.datadist.cache_table import Entry
from kvelastic.datadist.local_caches import ClaimedCaches, LocalCaches
from kvelastic.errors import UnsupportedError
from kvelastic.pool.pool import ElasticPool, pool_at
from kvelastic.transfer import Link, Node, Piece, Registered, register_pool


class Exposed:
    """Memory exposed to peers. Any thread may call. Call `bind` before other methods."""

    def __init__(self, caches: LocalCaches) -> None:
        self._caches = caches
        self._lock = threading.Lock()
        self._node: Node | None = None
        self._pools: dict[ElasticPool, tuple[Registered, int]] = {}
        self._tensors: dict[int, list[Registered | ElasticPool]] = {}
        """Exposed memory by cache id."""

    def bind(self, node: Node) -> None:
        """Expose everything through `node`. It replaces the previous node, which is closed."""
        with self._lock:
            entries = [self._caches.of_id(cache_id) for cache_id in self._tensors]
            self._node = node
            self._pools.clear()
            self._tensors.clear()
            for memory in self._caches.pools():
                if memory.pool.is_on_host:
                    self._add_pool(node, memory.pool)
        for entry in entries:
            self.expose(entry)

    def expose(self, entry: Entry) -> None:
        """Let peers access a registered cache.

        Raises `InvalidArgumentError`, and changes nothing, if peers can access the memory already.
        """
        with self._lock, ExitStack() as undo:
            node = self._bound()
            held: list[Registered | ElasticPool] = []
            for address in entry.addrs[0]:
                pool = pool_at(address)
                if pool is not None and pool.is_on_host:
                    self._add_pool(node, pool)
                    held.append(pool)
                    undo.callback(self._remove_pool, node, pool)
                else:
                    registered = node.register(address, entry.desc.size)
                    held.append(registered)
                    undo.callback(node.unregister, registered)
            self._tensors[entry.cache_id] = held
            undo.pop_all()

    def withdraw(self, entry: Entry) -> None:
        """End the peers' access to a registered cache. Idempotent."""
        with self._lock:
            node = self._bound()
            for held in self._tensors.pop(entry.cache_id, ()):
                if isinstance(held, ElasticPool):
                    self._remove_pool(node, held)
                else:
                    node.unregister(held)

    def claim(self, link: Link, claim: bytes, pieces: Sequence[Piece]) -> ClaimedCaches:
        """Hold the caches that a peer's copy means until the copy ends. Called by the node.

        Raises `NotRegisteredError` if the pieces are not, or no longer, part of the claimed cache.
        """
        return self._caches.claim(wire.claimed_cache(claim), pieces)

    def _add_pool(self, node: Node, pool: ElasticPool) -> None:
        known = self._pools.get(pool)
        if known is not None:
            self._pools[pool] = (known[0], known[1] + 1)
        else:
            self._pools[pool] = (register_pool(node, pool), 1)

    def _remove_pool(self, node: Node, pool: ElasticPool) -> None:
        registered, count = self._pools[pool]
        if count > 1:
            self._pools[pool] = (registered, count - 1)
        else:
            del self._pools[pool]
            node.unregister(registered)

    def _bound(self) -> Node:
        if self._node is None:
            raise UnsupportedError("there is no node yet")
        return self._node
