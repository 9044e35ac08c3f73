"""Snapshots of a process's state and pools, with the fields of kvcached's newer versions.

    kvi.observability_snapshot_dict(); manager.observability_snapshot_dict()

Plain frozen values, not updated after their creation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from kvelastic import config
from kvelastic.pool.tensor_views import KV_LAYOUTS

SCHEMA_VERSION: Final = "kvcached.observability.v1"
"""Snapshots have the fields of this schema, so its readers can read them."""


@dataclass(frozen=True)
class RuntimeSnapshot:
    """The arguments of `init_kvelastic` and the resulting state."""

    schema_version: str
    engine: str
    initialized: bool
    device: str | None
    """kvelastic's name of the device: `host`, or a GPU's UUID."""
    world_size: int
    pp_rank: int
    async_sched: bool
    contiguous_layout: bool
    is_worker: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as a dict for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class KVCachePoolSnapshot:
    """One pool. A page holds blocks of every layer, K and V."""

    schema_version: str
    pool_type: str
    integration: str
    pool_name: str
    group_id: int
    num_layers: int
    num_kv_buffers: int
    page_size_bytes: int
    block_size_bytes: int
    """Bytes of one block in one buffer: one layer's K, or V."""
    total_blocks: int
    available_blocks: int
    """Blocks that `alloc` could return, reserved ones among them."""
    allocated_blocks: int
    """Blocks in use and reserved ones."""
    reserved_blocks: int
    available_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    null_block_reserved: bool
    virtual_per_layer_bytes: int
    virtual_total_bytes: int
    mapped_bytes: int
    total_pages: int
    """Number of pages that the limit allows."""
    free_pages: int
    inuse_pages: int
    reserved_pages: int
    """Mapped pages without blocks in use or cached."""
    available_physical_pages: int
    """Pages that could be granted and mapped within the limit, without reclaim."""
    effective_free_pages: int
    in_shrink: bool
    shrink_target_blocks: int | None
    resize_target_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as a dict for JSON."""
        return asdict(self)


def pool_snapshot(
    stats: Mapping[str, Any],
    limit: Mapping[str, Any],
    *,
    name: str,
    group_id: int,
    integration: str,
    layers: int,
    kv_buffers: int,
    block_bytes: int,
    range_bytes: int,
    room_bytes: int,
) -> KVCachePoolSnapshot:
    """Build a snapshot from a native pool's `stats()` and `limit_state()`.

    `block_bytes` counts all layers and buffers. `room_bytes` is the device memory available to the
    pool.
    """
    page_bytes, over_bytes = stats["page_bytes"], limit["over_bytes"]
    limit_pages, mapped, parked = (
        stats["pages_limit"],
        stats["pages_mapped"],
        stats["pages_parked"],
    )
    room = min(max(0, limit_pages - mapped), room_bytes // page_bytes)
    available, reserved = stats["blocks_available"], stats["blocks_reserved"]
    allocated = stats["blocks_used"] + reserved
    blocks_a_page = max(1, page_bytes // block_bytes)
    return KVCachePoolSnapshot(
        schema_version=SCHEMA_VERSION,
        pool_type="kv_cache",
        integration=integration,
        pool_name=name,
        group_id=group_id,
        num_layers=layers,
        num_kv_buffers=kv_buffers,
        page_size_bytes=page_bytes,
        block_size_bytes=block_bytes // (layers * kv_buffers),
        total_blocks=stats["blocks_total"],
        available_blocks=available,
        allocated_blocks=allocated,
        reserved_blocks=reserved,
        available_bytes=available * block_bytes,
        allocated_bytes=allocated * block_bytes,
        reserved_bytes=reserved * block_bytes,
        null_block_reserved=True,
        virtual_per_layer_bytes=range_bytes // layers,
        virtual_total_bytes=range_bytes,
        mapped_bytes=limit["mapped_bytes"],
        total_pages=limit_pages,
        free_pages=max(0, limit_pages - mapped) + parked,
        inuse_pages=mapped - parked,
        reserved_pages=parked,
        available_physical_pages=room,
        effective_free_pages=room + parked,
        in_shrink=over_bytes > 0,
        shrink_target_blocks=limit_pages * blocks_a_page if over_bytes else None,
        resize_target_bytes=limit["effective_limit_bytes"] if over_bytes else None,
    )


def get_capabilities() -> dict[str, Any]:
    """Return the features of this interface, with the keys of kvcached 0.1.6.

    Page size and layout come from this process's variables. Imports no engine. Raises `ConfigError`
    for an invalid variable.
    """
    settings = config.load()
    shared = {
        "kv_layouts": list(KV_LAYOUTS),
        "hybrid_linear_state_pooling": True,
        "prefix_caching": True,
        "page_aware_eviction": True,
        "worker_ipc": False,  # a process manages the cache of one rank
    }
    attention_types = ["MHA", "GQA", "MLA"]
    return {
        "schema_version": SCHEMA_VERSION,
        "features": {
            "runtime_snapshot": True,
            "kv_cache_pool_snapshot": True,
            "registered_kv_cache_pool_snapshots": True,
            "read_only": True,
            "policy_control": False,
            "instance_memory_limit": False,  # each pool has its own: `set_memory_limit`
            "operation_counters": False,
            "runtime_reservation_reporting": False,
        },
        "backends": {
            "kv_pooling": True,
            "elastic_capacity": True,
            "resize": True,
            "trim": True,
            "default_page_size_bytes": settings.page_size_bytes,
            "contiguous_layout_default": settings.contiguous_layout,
            "non_kv_memory_management": False,
        },
        "integrations": {
            "vllm": {
                "attention_types": [*attention_types, "HYBRID_LINEAR"],
                "hybrid_linear_state_pooling_mode": "unified_pool",
                **shared,
            },
            "sglang": {
                "attention_types": attention_types,
                "hybrid_linear_state_pooling_mode": "separate_allocation",
                **shared,
            },
        },
        "pool_snapshot_fields": [field.name for field in fields(KVCachePoolSnapshot)],
        "runtime_snapshot_fields": [field.name for field in fields(RuntimeSnapshot)],
        "operation_counter_names": [],
    }
