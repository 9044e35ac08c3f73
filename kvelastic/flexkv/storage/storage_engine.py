"""Opens the tiers that a configuration names, and knows where each device's blocks lie.

storage = StorageEngine(model, cache, settings)
storage.stores[DeviceType.CPU]
storage.tiers                      # {DeviceType.CPU: 0, DeviceType.SSD: 1, ...}, nearest first
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig, item_bytes
from kvelastic.flexkv.common.storage import (
    KVCacheLayout,
    KVCacheLayoutType,
    StorageHandle,
    StorageHandleType,
)
from kvelastic.flexkv.common.transfer import DeviceType
from kvelastic.flexkv.storage.allocator import (
    CPUAllocator,
    RemoteAllocator,
    SSDAllocator,
    TierAllocator,
)
from kvelastic.tiers.base import Store
from kvelastic.tiers.namespace import Namespace


def rank_layout(
    model: ModelConfig,
    cache: CacheConfig,
    num_block: int,
    kind: KVCacheLayoutType = KVCacheLayoutType.BLOCKFIRST,
) -> KVCacheLayout:
    """How one tensor-parallel rank's blocks look."""
    return KVCacheLayout(
        kind,
        model.num_layers,
        num_block,
        cache.tokens_per_block,
        model.heads_per_rank,
        model.head_size,
        model.kv_dim,
        item_bytes(model.dtype),
    )


class StorageEngine:
    """See the module. Its stores are closed by whoever runs them (the transfer engine)."""

    def __init__(self, model: ModelConfig, cache: CacheConfig, settings: Config) -> None:
        """Opens all tiers. Blocks; raises what a store raises, with none left open then."""
        self.part_bytes = rank_layout(model, cache, 1).block_bytes
        """What a record has of each rank."""
        self.record_bytes = self.part_bytes * model.ranks_in_a_record
        self.namespace = _namespace(model, cache, self.record_bytes)
        self.layout = rank_layout(model, cache, 1)
        self.stores: dict[DeviceType, Store] = {}
        allocators: dict[DeviceType, TierAllocator] = {
            DeviceType.CPU: CPUAllocator(cache, settings)
        }
        if cache.enable_ssd:
            allocators[DeviceType.SSD] = SSDAllocator(cache)
        if cache.enable_remote:
            allocators[DeviceType.REMOTE] = RemoteAllocator(cache)
        try:
            for device, allocator in allocators.items():
                self.stores[device] = allocator.allocate(self.record_bytes, self.namespace)
                self.stores[device].enter(self.namespace)
            slots = max(4, cache.staging_bytes // self.record_bytes)
            self.staging = _vmm.Staging(slots, self.record_bytes)
        except BaseException:
            self.close()
            raise
        self.tiers = {device: place for place, device in enumerate(self.stores)}
        """The place of each tier, nearest first."""

    def get_storage_handle(self, device: DeviceType) -> StorageHandle:
        """Where a device's blocks lie. Raises `InvalidArgumentError` for one that is not opened."""
        if device not in self.stores:
            raise InvalidArgumentError(
                f"there is no {device.name} tier; there are"
                f" {', '.join(each.name for each in self.stores)}"
            )
        return StorageHandle(StorageHandleType.STORE, self.stores[device], self.layout)

    def has_storage_handle(self, device: DeviceType) -> bool:
        """Whether that tier is open."""
        return device in self.stores

    def next_generation(self) -> Namespace:
        """Records from now on are of another world; answers it. See `GlobalCacheEngine.reset`."""
        # At random: another process that counts from the same start must not meet this.
        self.namespace = replace(self.namespace, generation=secrets.randbits(62))
        for store in self.stores.values():
            store.enter(self.namespace)
        return self.namespace

    def close(self) -> None:
        """Close what was opened; for a start that failed."""
        for store in self.stores.values():
            store.close()


def _namespace(model: ModelConfig, cache: CacheConfig, record_bytes: int) -> Namespace:
    """Without a fingerprint of the weights nobody else can know these records: at random."""
    return Namespace(
        model=model.model,
        weights=model.weights,
        dtype=model.dtype_name,
        layout=(
            f"flexkv {model.num_layers}x{model.kv_dim}x{model.num_kv_heads}x{model.head_size}"
            f" {model.engine}"
        ).rstrip(),
        block_tokens=cache.tokens_per_block,
        record_bytes=record_bytes,
        ranks=f"tp{model.ranks_in_a_record}",
        hash_algorithm="block_keys",
        generation=0 if model.weights else secrets.randbits(62),
    )
