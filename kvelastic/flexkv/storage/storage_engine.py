"""Opens the stores that a configuration names.

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
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.transfer import DeviceType
from kvelastic.flexkv.storage.allocator import allocate
from kvelastic.tiers.base import Store
from kvelastic.tiers.namespace import Namespace


class StorageEngine:
    """The stores by device, the nearest first. The transfer engine closes them."""

    def __init__(self, model: ModelConfig, cache: CacheConfig, settings: Config) -> None:
        """Open all stores. Blocks. Raises the error of a store after closing the others."""
        self.tokens_per_block = cache.tokens_per_block
        self.part_bytes = model.rank_token_bytes * cache.tokens_per_block
        """Bytes of a rank's part of a record."""
        self.record_bytes = self.part_bytes * model.ranks_in_a_record
        self.namespace = _namespace(model, cache, self.record_bytes)
        self.stores: dict[DeviceType, Store] = {}
        wanted = [
            DeviceType.CPU,
            *([DeviceType.SSD] if cache.enable_ssd else []),
            *([DeviceType.REMOTE] if cache.enable_remote else []),
        ]
        try:
            for device in wanted:
                self.stores[device] = allocate(
                    device, cache, settings, self.record_bytes, self.namespace
                )
                self.stores[device].enter(self.namespace)
            slots = max(4, cache.staging_bytes // self.record_bytes)
            self.staging = _vmm.Staging(slots, self.record_bytes)
        except BaseException:
            self.close()
            raise
        self.tiers = {device: place for place, device in enumerate(self.stores)}

    def store(self, device: DeviceType) -> Store:
        """Return the store of a device. Raises `InvalidArgumentError` if it is not open."""
        if device not in self.stores:
            raise InvalidArgumentError(
                f"there is no {device.name} tier; there are"
                f" {', '.join(each.name for each in self.stores)}"
            )
        return self.stores[device]

    def next_generation(self) -> Namespace:
        """Enter and return another namespace. See `GlobalCacheEngine.reset`."""
        # Random, so that another process does not get the same generation.
        self.namespace = replace(self.namespace, generation=secrets.randbits(62))
        for store in self.stores.values():
            store.enter(self.namespace)
        return self.namespace

    def close(self) -> None:
        """Close the stores after a failed start."""
        for store in self.stores.values():
            store.close()


def _namespace(model: ModelConfig, cache: CacheConfig, record_bytes: int) -> Namespace:
    """Return the namespace. Without a fingerprint it is random: other processes find no records."""
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
