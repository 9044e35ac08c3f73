"""The block manager of kvcached's interface, which a serving engine calls for every request.

    manager = get_kv_cache_manager(num_blocks, block_size, cell_size, num_layers)
    ids = manager.alloc(4)        # ids index the tensors of alloc_kv_cache; None: not available
    manager.free(ids)

Thread-safe. The frequent calls are methods of the native pool, because a Python wrapper would cost
more than the calls themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Final

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError, LimitError
from kvelastic.kvcached.snapshots import KVCachePoolSnapshot, pool_snapshot
from kvelastic.pool.pool import ElasticPool

_UNITS: Final = {"bytes": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


class KVCacheManager:
    """Blocks of one pool. Returned by `get_kv_cache_manager`; valid until `shutdown_kvelastic`."""

    __slots__ = (
        "_buffers", "_pool", "_revised_limit", "alloc", "available_size", "block_size", "clear",
        "free", "free_reserved", "group_id", "num_blocks", "num_kv_buffers", "num_layers",
        "set_memory_limit", "trim", "try_to_reserve",
    )  # fmt: skip

    alloc: Callable[[int], list[int] | None]
    """`alloc(n)`: return the ids of n blocks, or None, with nothing changed, if they are not
    available now. Uses reserved blocks first. May block while pages are created. Raises
    `PoolFailedError` if no later call could succeed."""

    free: Callable[[Sequence[int]], None]
    """`free(ids)`: free all of the blocks or none. Raises `DoubleFreeError`, `UnknownBlockError` or
    `NullBlockError` (all `ValueError`) with nothing changed."""

    available_size: Callable[[], int]
    """Return the number of blocks that `alloc` could return now, under the current limit. Never
    blocks."""

    try_to_reserve: Callable[[int], bool]
    """`try_to_reserve(n)`: reserve n more blocks with their memory for later allocs. Returns False,
    with nothing changed, if they are not available or would exceed the limit. Reserved blocks
    are not guaranteed: a lower limit, a sleep, or another instance that needs the memory
    releases them all. Then `stats()["blocks_reserved"]` is 0, and `alloc` uses other available
    blocks."""

    free_reserved: Callable[[], None]
    """Release the blocks that `try_to_reserve` reserved and `alloc` has not used."""

    trim: Callable[[], int]
    """Release every parked page to the device; return the bytes. Blocks until they are unmapped."""

    clear: Callable[[], None]
    """Free every block and reservation. All block ids become invalid."""

    set_memory_limit: Callable[..., dict[str, Any]]
    """`set_memory_limit(limit_bytes, revision=n)`: see `RevisedLimit.set`."""

    def __init__(
        self,
        pool: ElasticPool,
        *,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_buffers: int,
        group_id: int,
    ) -> None:
        native = pool.blocks
        self._pool = pool
        self._buffers = num_layers * num_kv_buffers
        self._revised_limit = RevisedLimit(native, pool.name, group_id)
        self.num_layers = num_layers
        self.num_kv_buffers = num_kv_buffers
        self.group_id = group_id
        self.num_blocks = num_blocks
        """Requested number of blocks, including the null block."""
        self.block_size = block_size
        """Tokens per block."""
        self.alloc = native.alloc
        self.free = native.free
        self.available_size = native.available_size
        self.try_to_reserve = native.try_to_reserve
        self.free_reserved = native.free_reserved
        self.trim = native.trim
        self.clear = native.clear
        self.set_memory_limit = self._revised_limit.set

    @property
    def name(self) -> str:
        """The instance's name in `kvctl`."""
        return self._pool.name

    @property
    def pool_name(self) -> str:
        """kvcached's name for `name`."""
        return self._pool.name

    def memory_limit_state(self) -> dict[str, Any]:
        """Return the result of `set_memory_limit` without setting a limit."""
        return self._revised_limit.state()

    def observability_snapshot(self, *, integration: str | None = None) -> KVCachePoolSnapshot:
        """Return a snapshot of the pool; `integration` overrides the engine's name."""
        native = self._pool.blocks
        geometry, device_set = native.geometry, self._pool.device_set
        return pool_snapshot(
            native.stats(),
            native.limit_state(),
            name=self._pool.name,
            group_id=self.group_id,
            integration=integration
            or self._pool.segment.control_block.read_header()["engine"].lower(),
            layers=self.num_layers,
            kv_buffers=self.num_kv_buffers,
            block_bytes=geometry.block_bytes * self._buffers,
            range_bytes=geometry.range_bytes,
            room_bytes=device_set.room() * device_set.page_bytes,
        )

    def observability_snapshot_dict(self, *, integration: str | None = None) -> dict[str, Any]:
        """Return the snapshot as a dict for JSON."""
        return self.observability_snapshot(integration=integration).to_dict()

    def resize(self, new_mem_size: int) -> bool:
        """Set the limit to `new_mem_size` bytes *per buffer* (one layer's K, or V), as in kvcached.

        Returns True if the limit is met. Returns False if blocks in use exceed it; then no page is
        added, and freed pages are released until it is met. A value above the tensors' size means
        their full size. Raises `LimitError` for a negative size.
        """
        if new_mem_size < 0:
            raise LimitError(f"a limit of {new_mem_size} bytes is not accepted; give 0 or more")
        limit_bytes = min(new_mem_size * self._buffers, self._pool.blocks.geometry.range_bytes)
        return bool(self._pool.blocks.set_limit(limit_bytes)["state"] == "applied")

    def get_mapped_memory_size(self, unit: str = "bytes") -> float:
        """Return the memory held now, including parked pages; `unit` is bytes, kb, mb or gb."""
        scale = _UNITS.get(unit)
        if scale is None:
            raise InvalidArgumentError(
                f"unit={unit!r} is not accepted; it must be {', '.join(_UNITS)}"
            )
        return self._pool.blocks.mapped_bytes / scale

    def get_page_occupancy(self, page_ids: Sequence[int] | None = None) -> dict[int, int]:
        """Return the blocks in use or cached by mapped page; `page_ids` None means every page."""
        return self._pool.blocks.occupancy(page_ids)

    def stats(self) -> dict[str, Any]:
        """Return pages, blocks and counters at one point in time."""
        return self._pool.blocks.stats()

    def check_integrity(self) -> None:
        """Check all counts; raises `IntegrityError` that names a mismatch. For tests."""
        self._pool.blocks.check_integrity()


class RevisedLimit:
    """The newest limit of one pool and its revision. Thread-safe."""

    def __init__(self, pool: _vmm.Pool, name: str, group_id: int) -> None:
        self._pool = pool
        self._name = name
        self._group_id = group_id
        self._lock = threading.Lock()
        self._revision: int | None = None
        self._limit_bytes: int | None = None

    def set(self, limit_bytes: int, *, revision: int) -> dict[str, Any]:
        """Set the limit of the whole pool, unless a newer revision has been set; see `state`.

        `status` is applied; deferred (blocks in use exceed the limit, which is met once they are
        freed); stale (the revision is older than the current one); or conflict (the current
        revision, with another limit). For stale and conflict, nothing changes. Raises `LimitError`
        for a negative limit, and `InvalidArgumentError` unless the revision is an integer of 0 or
        more.
        """
        try:
            limit_bytes, revision = index(limit_bytes), index(revision)
        except TypeError:
            raise InvalidArgumentError(
                f"limit_bytes={limit_bytes!r}, revision={revision!r}: both must be whole numbers"
            ) from None
        if limit_bytes < 0:
            raise LimitError(f"a limit of {limit_bytes} bytes is not accepted; give 0 or more")
        if revision < 0:
            raise InvalidArgumentError(f"revision={revision} is not accepted; give 0 or more")
        with self._lock:
            if self._revision is not None and revision < self._revision:
                return self._state("stale", f"the present revision is {self._revision}")
            if revision == self._revision and limit_bytes != self._limit_bytes:
                return self._state("conflict", "revision_reused_with_different_limit")
            if revision != self._revision:
                self._pool.set_limit(min(limit_bytes, _vmm.UNLIMITED_BYTES))
                self._revision, self._limit_bytes = revision, limit_bytes
            return self._state()

    def state(self) -> dict[str, Any]:
        """Return the current state; `limit_bytes` and `revision` are None before `set`."""
        with self._lock:
            return self._state()

    def _state(self, status: str = "", reason: str = "") -> dict[str, Any]:
        state, capacity_bytes = self._pool.limit_state(), self._pool.stats()
        effective_bytes, mapped_bytes = state["effective_limit_bytes"], state["mapped_bytes"]
        over_bytes = state["over_bytes"]
        if not status:
            status = "deferred" if over_bytes else "applied"
            reason = "inuse_capacity_above_limit" if over_bytes else ""
        return {
            "status": status,
            "pool_name": self._name,
            "group_id": self._group_id,
            "limit_bytes": self._limit_bytes,
            "effective_limit_bytes": effective_bytes,
            "current_capacity_bytes": capacity_bytes["pages_limit"] * capacity_bytes["page_bytes"],
            "revision": self._revision,
            "mapped_bytes": mapped_bytes,
            "remaining_bytes": max(0, effective_bytes - mapped_bytes),
            "overage_bytes": over_bytes,
            "reason": reason or None,
        }
