"""Memory of this cluster that peers can access: pools of allocated caches, registered tensors.

A pool of caches is exposed once as a whole; each copy pins the blocks it uses. If registered
tensors are in a caller's elastic pool, that pool is exposed while one of them is registered. Other
memory of the caller is exposed directly.
"""

from __future__ import annotations

import threading

from kvelastic.datadist.local_caches import Entry, LocalCaches
from kvelastic.pool.pool import ElasticPool, pool_at
from kvelastic.transfer import Node, Registered, register_pool


class Exposed:
    """Memory exposed to peers. Any thread may call. Call `bind` before other methods."""

    _node: Node

    def __init__(self, caches: LocalCaches) -> None:
        self._caches = caches
        self._lock = threading.RLock()
        self._pools: dict[ElasticPool, Registered] = {}
        self._memory: dict[int | None, list[Registered]] = {}
        """Exposed memory by cache id; of None, the pools of allocated caches."""

    def bind(self, node: Node) -> None:
        """Expose everything through `node`. It replaces the previous node, which is closed."""
        with self._lock:
            entries = [self._caches.of_id(one) for one in self._memory if one is not None]
            self._node = node
            self._pools.clear()
            pools = [memory.pool for memory in self._caches.pools]
            own = [self._add_pool(pool) for pool in pools if pool.is_on_host]
            self._memory = {None: own}
        for entry in entries:
            self.expose(entry)

    def expose(self, entry: Entry) -> None:
        """Let peers access a registered cache.

        Raises `InvalidArgumentError`, and changes nothing, if peers can access the memory already.
        """
        with self._lock:
            held = self._memory[entry.cache_id] = []
            try:
                for address in entry.addrs[0]:
                    pool = pool_at(address)
                    if pool is not None and pool.is_on_host:
                        held.append(self._add_pool(pool))
                    else:
                        held.append(self._node.register(address, entry.desc.size))
            except BaseException:
                self.withdraw(entry)
                raise

    def withdraw(self, entry: Entry) -> None:
        """End the peers' access to a registered cache. Idempotent."""
        with self._lock:
            gone = self._memory.pop(entry.cache_id, [])
            kept = {one for held in self._memory.values() for one in held}
            self._pools = {pool: one for pool, one in self._pools.items() if one in kept}
            for registered in set(gone) - kept:
                self._node.unregister(registered)

    def _add_pool(self, pool: ElasticPool) -> Registered:
        if pool not in self._pools:
            self._pools[pool] = register_pool(self._node, pool)
        return self._pools[pool]
