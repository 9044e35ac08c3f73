"""Creates the blocks of each device: a tier's store, or an engine's tensors.

Stores allocate memory and files as blocks arrive, so a large block count alone costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.device.selection import resolve
from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.config import MOONCAKE_PREFIX, CacheConfig
from kvelastic.flexkv.common.memory_handle import describe
from kvelastic.flexkv.common.storage import KVCacheLayout, StorageHandle, StorageHandleType
from kvelastic.flexkv.common.transfer import DeviceType
from kvelastic.tiers.base import Store
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.stores.disk.format import aligned
from kvelastic.tiers.stores.disk.store import DiskStore
from kvelastic.tiers.stores.folder.store import FolderStore
from kvelastic.tiers.stores.host.store import HostStore
from kvelastic.tiers.stores.mooncake.store import MooncakeStore

_PER_FILE_BYTES = 4 << 20
"""Space for the tables of a disk's files."""
_MOST_BYTES = 1 << 60


def allocate(
    device: DeviceType,
    cache: CacheConfig,
    settings: Config,
    record_bytes: int,
    namespace: Namespace,
) -> Store:
    """Open the store of a tier. Blocks; raises the store's errors.

    CPU is an elastic pool in the host's ledger (`kvctl list` shows it). SSD uses files in folders.
    REMOTE is a shared folder or a Mooncake Store.
    """
    if device is DeviceType.CPU:
        count = cache.num_cpu_blocks
        # Twice the size, for the null block and unused space in pages; `max_records` is the limit.
        page_bytes = max(settings.page_size_bytes, 2 * record_bytes)
        return HostStore(
            record_bytes,
            min(2 * (count + 1) * record_bytes + 4 * page_bytes, _MOST_BYTES),
            settings=settings,
            name=cache.cpu_name,
            model=namespace.model,
            policy=cache.eviction_policy,
            max_records=count,
        )
    if device is DeviceType.SSD:
        limit_bytes = cache.num_ssd_blocks * aligned(record_bytes) + _PER_FILE_BYTES
        return DiskStore(
            cache.ssd_folders,
            record_bytes,
            min(limit_bytes, _MOST_BYTES),
            namespace,
            policy=cache.eviction_policy,
        )
    where = cache.remote_cache_path or ""
    if where.startswith(MOONCAKE_PREFIX):
        return MooncakeStore(where.removeprefix(MOONCAKE_PREFIX), record_bytes)
    blocks = cache.num_remote_blocks
    return FolderStore(
        where,
        record_bytes,
        namespace,
        limit_bytes=None if blocks is None else blocks * record_bytes,
    )


class GPUAllocator:
    """Describes the tensors of an engine. The engine keeps their memory."""

    @staticmethod
    def from_addresses(
        layout: KVCacheLayout, addresses: Sequence[int], device: str, settings: Config
    ) -> StorageHandle:
        """Describe blocks at addresses of this process, on `device` (cpu, cuda:N, GPU-<uuid>).

        There is one address for all layers, or one for each. Raises `InvalidArgumentError`, and
        `DeviceUnavailableError` for an unavailable device.
        """
        driver = resolve(device, settings).driver()
        blocks = _vmm.EngineBlocks(driver, layout.parts(addresses), layout.num_block)
        return StorageHandle(StorageHandleType.ENGINE, blocks, layout)

    @classmethod
    def from_tensors(
        cls, layout: KVCacheLayout, tensors: Sequence[Any], settings: Config
    ) -> StorageHandle:
        """Describe blocks of tensors: one for all layers, one for each, or all K's, then all V's.

        Raises `InvalidArgumentError` if one is not contiguous or has another size.
        """
        places = [tensor_memory(tensor) for tensor in layout.in_record_order(tensors)]
        wanted = layout.total_bytes // max(1, len(places))
        for _, size_bytes, _ in places:
            if size_bytes != wanted:
                raise InvalidArgumentError(
                    f"a tensor of {size_bytes} bytes was registered where the layout has {wanted};"
                    " tensors and layout must agree"
                )
        devices = {device for _, _, device in places}
        if len(devices) != 1:
            raise InvalidArgumentError(f"tensors on {sorted(devices)}; one rank is on one device")
        return cls.from_addresses(layout, [at for at, _, _ in places], devices.pop(), settings)


def tensor_memory(tensor: Any) -> tuple[int, int, str]:
    """Return address, bytes and device of a contiguous tensor. Raises `InvalidArgumentError`."""
    address, found = describe(tensor)
    size_bytes = math.prod(found.shape) * found.item_bytes
    is_torch = hasattr(tensor, "is_contiguous")
    is_contiguous = tensor.is_contiguous() if is_torch else tensor.flags.c_contiguous
    if not is_contiguous or not (is_torch or tensor.flags.writeable):
        raise InvalidArgumentError("a tensor that is not contiguous, or an array that is read-only")
    return address, size_bytes, str(tensor.device) if is_torch else "cpu"
