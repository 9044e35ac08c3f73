"""Where the blocks of each device come from: tiers' stores, or an engine's tensors.

An allocator makes what holds the blocks of one device, by the sizes of a `CacheConfig`. Memory and
files are taken as blocks come, so a large number of blocks costs nothing by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.device import resolve
from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.config import MOONCAKE_PREFIX, CacheConfig
from kvelastic.flexkv.common.storage import KVCacheLayout, StorageHandle, StorageHandleType
from kvelastic.tiers.base import Store
from kvelastic.tiers.disk import DiskStore
from kvelastic.tiers.disk_format import aligned
from kvelastic.tiers.folder import FolderStore
from kvelastic.tiers.host import HostStore
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.remote import MooncakeStore

_PER_FILE_BYTES = 4 << 20
"""Room for the tables of a disk's files besides the records."""


class TierAllocator(ABC):
    """Makes the store of one tier."""

    @abstractmethod
    def allocate(self, record_bytes: int, namespace: Namespace) -> Store:
        """A store of records of this size. Blocks; raises what the store raises."""


class CPUAllocator(TierAllocator):
    """The host's memory: an elastic pool in the host's ledger (`kvctl list` shows it)."""

    def __init__(self, cache: CacheConfig, settings: Config) -> None:
        self._cache = cache
        self._settings = settings

    def allocate(self, record_bytes: int, namespace: Namespace) -> Store:
        """As `TierAllocator.allocate`."""
        count = self._cache.num_cpu_blocks
        # Whole pages, the null block and what a page has left over come on top; the number of
        # records is what bounds it.
        page_bytes = max(self._settings.page_size_bytes, 2 * record_bytes)
        return HostStore(
            record_bytes,
            min(2 * (count + 1) * record_bytes + 4 * page_bytes, 1 << 60),
            settings=self._settings,
            name=self._cache.cpu_name,
            model=namespace.model,
            policy=self._cache.eviction_policy,
            max_records=count,
        )


class SSDAllocator(TierAllocator):
    """Files in one folder or several."""

    def __init__(self, cache: CacheConfig) -> None:
        self._cache = cache

    def allocate(self, record_bytes: int, namespace: Namespace) -> Store:
        """As `TierAllocator.allocate`."""
        limit_bytes = self._cache.num_ssd_blocks * aligned(record_bytes) + _PER_FILE_BYTES
        return DiskStore(
            self._cache.ssd_folders,
            record_bytes,
            min(limit_bytes, 1 << 60),
            namespace,
            policy=self._cache.eviction_policy,
        )


class RemoteAllocator(TierAllocator):
    """A shared folder, or a Mooncake Store."""

    def __init__(self, cache: CacheConfig) -> None:
        self._cache = cache

    def allocate(self, record_bytes: int, namespace: Namespace) -> Store:
        """As `TierAllocator.allocate`."""
        where = self._cache.remote_cache_path or ""
        if where.startswith(MOONCAKE_PREFIX):
            return MooncakeStore(where.removeprefix(MOONCAKE_PREFIX), record_bytes)
        count = self._cache.num_remote_blocks
        limit_bytes = None if count is None else count * record_bytes
        return FolderStore(where, record_bytes, namespace, limit_bytes=limit_bytes)


class GPUAllocator:
    """Tensors that the engine has: nothing is allocated, they are described."""

    @staticmethod
    def from_addresses(
        layout: KVCacheLayout, addresses: Sequence[int], device: str, settings: Config
    ) -> StorageHandle:
        """Blocks at addresses of this process, on `device` (cpu, cuda:N, GPU-<uuid>).

        One address for all layers, or one for each. The caller keeps the memory. Raises
        `InvalidArgumentError`, and `DeviceUnavailableError` for a device that is not there.
        """
        driver = resolve(device, settings).driver()
        blocks = _vmm.EngineBlocks(driver, layout.parts(addresses), layout.num_block)
        return StorageHandle(StorageHandleType.ENGINE, blocks, layout)

    @classmethod
    def from_tensors(
        cls, layout: KVCacheLayout, tensors: Sequence[Any], settings: Config
    ) -> StorageHandle:
        """The same for arrays of NumPy or tensors of torch: one for all layers, one for each, or
        those of K and then those of V.

        Raises `InvalidArgumentError` for one that is not contiguous or has another size.
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
    """Address, bytes and device of a contiguous array or tensor.

    Raises `InvalidArgumentError` for anything else.
    """
    interface = getattr(tensor, "__array_interface__", None)
    if interface is not None and not hasattr(tensor, "data_ptr"):
        if not tensor.flags.c_contiguous or not tensor.flags.writeable:
            raise InvalidArgumentError("an array that is not contiguous, or is read-only")
        return int(interface["data"][0]), int(tensor.nbytes), "cpu"
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "is_contiguous"):
        if not tensor.is_contiguous():
            raise InvalidArgumentError("a tensor that is not contiguous")
        size_bytes = int(tensor.numel()) * int(tensor.element_size())
        return int(tensor.data_ptr()), size_bytes, str(tensor.device)
    raise InvalidArgumentError(
        f"{type(tensor).__name__} is no array of NumPy and no tensor of torch; register one"
    )
