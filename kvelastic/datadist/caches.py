"""Handles of caches, which the managers' calls take and return.

    cache = manager.allocate_cache(CacheDesc(2, [4, 1024], DataType.DT_FLOAT16))
    cache.cache_id, cache.tensor_addrs
    cpu = Cache.create_cpu_cache(host_desc, addrs)      # over the caller's host memory

A handle does not own memory. The manager owns it, or the caller for a CPU cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvelastic.datadist import checks
from kvelastic.datadist.descriptors import CacheDesc
from kvelastic.datadist.enums import Placement
from kvelastic.datadist.local_caches import Entry
from kvelastic.datadist.status import LLMParamError


class CacheHandle:
    """Base of both generations' handles. Created only by managers and `create_cpu_cache`."""

    def __init__(self, entry: Entry, on_delete: Callable[[int], None] | None = None) -> None:
        """`on_delete` is called with the id when a handle of the first generation is deleted."""
        self.entry = entry
        self._on_delete = on_delete

    @property
    def cache_id(self) -> int:
        """The cache's id in its cluster; -1 for a CPU cache."""
        return self.entry.cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """The description that the cache was created with."""
        return self.entry.desc

    @property
    def is_blocks_cache(self) -> bool:
        """Whether the cache is used by blocks. A CPU cache can also be used by rows."""
        return self.entry.is_blocks

    @property
    def device_addrs(self) -> list[list[int]]:
        """Addresses by device, then by tensor; empty after deallocation."""
        return [list(one) for one in self.entry.addrs]

    def invalidate(self) -> None:
        """Detach the handle from the cache: another cache may get its memory."""
        self.entry = replace(self.entry, addrs=())
        self._on_delete = None

    def __repr__(self) -> str:
        """Return kind, id and description."""
        return f"{type(self).__name__}(cache_id={self.cache_id}, cache_desc={self.cache_desc})"


class Cache(CacheHandle):
    """A cache of `CacheManager`, which has one device per process."""

    @property
    def tensor_addrs(self) -> list[int]:
        """Address of each tensor; empty after deallocation."""
        return list(self.entry.addrs[0]) if self.entry.addrs else []

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: Sequence[int]) -> Cache:
        """Create a cache over the caller's host memory, which must stay mapped while it is used.

        Raises `AttributeError` for None, `TypeError` and `LLMParamError` for invalid arguments.
        """
        return cls(_cpu_cache(cache_desc, addrs))


class KvCache(CacheHandle):
    """A cache of `KvCacheManager`: one copy on each device of the process.

    Deleting the handle also drops the cache id's reference to the memory.
    """

    per_device_tensor_addrs = CacheHandle.device_addrs

    @classmethod
    def create_cpu_cache(
        cls, cache_desc: CacheDesc, addrs: Sequence[int] | Sequence[Sequence[int]]
    ) -> KvCache:
        """Create a cache over the caller's host memory.

        With several devices, `addrs` is a list of addresses for each. Otherwise as
        `Cache.create_cpu_cache`.
        """
        is_nested = isinstance(addrs, (list, tuple)) and not all(isinstance(x, int) for x in addrs)
        return cls(_cpu_cache(cache_desc, *(addrs if is_nested else [addrs])))

    def __del__(self) -> None:
        if self._on_delete is not None:
            self._on_delete(self.cache_id)


def _cpu_cache(cache_desc: CacheDesc, *addrs: object) -> Entry:
    """Check the addresses of a CPU cache by device."""
    if cache_desc is None or None in addrs:
        raise AttributeError("create_cpu_cache() needs a cache_desc and addrs, and got None")
    if checks.instance("cache_desc", cache_desc, CacheDesc).placement is not Placement.HOST:
        raise LLMParamError(
            "a CPU cache lies in host memory: give its CacheDesc placement=Placement.HOST"
        )
    found = tuple(tuple(checks.integers("addrs", one, least=1)) for one in addrs)
    for one in found:
        if len(one) != cache_desc.num_tensors:
            raise LLMParamError(
                f"{len(one)} addrs are given for {cache_desc.num_tensors} tensors; give one each"
            )
    return Entry(cache_desc, is_blocks=True, addrs=found)
