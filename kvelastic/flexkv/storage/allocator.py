"""Creates the blocks of each device: a tier's store, or an engine's tensors.

Stores allocate memory and files as blocks arrive, so a large block count alone costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.device.selection import resolve
from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.config import MOONCAKE_PREFIX, CacheConfig
from kvelastic.flexkv.common.memory_handle import describe
from kvelastic.flexkv.common.storage import KVCacheLayout, in_blocks
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


def engine_blocks(
    tensors: Sequence[Any], layout: KVCacheLayout, settings: Config
) -> _vmm.EngineBlocks:
    """Describe an engine's blocks: one tensor for all layers, one for each, or K's, then V's.

    The engine keeps their memory. Raises `InvalidArgumentError` if they do not have the layout.
    """
    parts: list[tuple[int, int, int, int, int]] = []
    described = [describe(tensor) for tensor in layout.in_record_order(tensors)]
    views, axis = in_blocks([one for _, one in described], layout)
    for (address, _), view in zip(described, views, strict=True):
        parts += [buffer.part(address) for buffer in view.buffers(axis)]
    if sum(part[2] for part in parts) != layout.block_bytes:
        raise InvalidArgumentError(
            f"a block of {len(tensors)} tensors has {sum(part[2] for part in parts)} bytes, and of"
            f" their layout {layout.block_bytes}; tensors and layout must agree"
        )
    if not all(hasattr(one, "data_ptr") or one.flags.writeable for one in tensors):
        raise InvalidArgumentError("an array that is read-only cannot be loaded into")
    devices = {str(getattr(tensor, "device", "cpu")) for tensor in tensors}
    if len(devices) != 1:
        raise InvalidArgumentError(f"tensors on {sorted(devices)}; one rank is on one device")
    return _vmm.EngineBlocks(resolve(devices.pop(), settings).driver(), parts, layout.num_block)
