"""Handles of caches, which the managers' calls take and return.

    cache = manager.allocate_cache(CacheDesc(2, [4, 1024], DataType.DT_FLOAT16))
    cache.cache_id, cache.tensor_addrs
    cpu = Cache.create_cpu_cache(host_desc, addrs)      # over the caller's host memory

A handle does not own memory. The manager owns it, or the caller for a CPU cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvelastic.datadist import checks
from kvelastic.datadist.descriptors import CacheDesc
from kvelastic.datadist.enums import Placement
from kvelastic.datadist.status import LLMParamError

NO_CACHE_ID: Final = -1
"""The id of a CPU cache, which no manager knows."""


class CacheHandle:
    """Base of both generations' handles. Created only by managers and `create_cpu_cache`."""

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        addrs: Sequence[Sequence[int]],
        *,
        is_blocks_cache: bool = False,
        on_delete: Callable[[int], None] | None = None,
    ) -> None:
        """`on_delete` is called with the id when a handle of the first generation is deleted."""
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._addrs = [list(one) for one in addrs]
        self._is_blocks_cache = is_blocks_cache
        self._on_delete = on_delete
        self._valid = True

    @property
    def cache_id(self) -> int:
        """The cache's id in its cluster; -1 for a CPU cache."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """The description that the cache was created with."""
        return self._cache_desc

    @property
    def is_blocks_cache(self) -> bool:
        """Whether the cache is used by blocks. A CPU cache can also be used by rows."""
        return self._is_blocks_cache

    @property
    def is_rows_cache(self) -> bool:
        """Whether the cache can be used by rows."""
        return not self._is_blocks_cache or self.is_cpu_cache

    @property
    def is_cpu_cache(self) -> bool:
        """Whether `create_cpu_cache` created it."""
        return self._cache_id == NO_CACHE_ID

    @property
    def device_addrs(self) -> list[list[int]]:
        """Addresses by device, then by tensor."""
        return [list(one) for one in self._addrs]

    @property
    def is_valid(self) -> bool:
        """False after deallocation or unregistration."""
        return self._valid

    def invalidate(self) -> None:
        """Mark the handle invalid: another cache may get its memory."""
        self._valid = False
        self._on_delete = None
        self._addrs = []

    def __repr__(self) -> str:
        """Return kind, id and description."""
        return f"{type(self).__name__}(cache_id={self._cache_id}, cache_desc={self._cache_desc})"


class Cache(CacheHandle):
    """A cache of `CacheManager`, which has one device per process."""

    @property
    def tensor_addrs(self) -> list[int]:
        """Address of each tensor; empty after deallocation."""
        return list(self._addrs[0]) if self._addrs else []

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: Sequence[int]) -> Cache:
        """Create a cache over the caller's host memory, which must stay mapped while it is used.

        Raises `AttributeError` for None, `TypeError` and `LLMParamError` for invalid arguments.
        """
        return cls(
            NO_CACHE_ID, cache_desc, _host_addresses(cache_desc, addrs), is_blocks_cache=True
        )


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
        each = (
            _host_addresses(cache_desc, *addrs) if is_nested else _host_addresses(cache_desc, addrs)
        )
        return cls(NO_CACHE_ID, cache_desc, each, is_blocks_cache=True)

    def __del__(self) -> None:
        if self._on_delete is not None:
            self._on_delete(self._cache_id)


def _host_addresses(cache_desc: CacheDesc, *addrs: object) -> list[list[int]]:
    """Check and return the addresses of a CPU cache by device."""
    if cache_desc is None or None in addrs:
        raise AttributeError("create_cpu_cache() needs a cache_desc and addrs, and got None")
    if checks.instance("cache_desc", cache_desc, CacheDesc).placement is not Placement.HOST:
        raise LLMParamError(
            "a CPU cache lies in host memory: give its CacheDesc placement=Placement.HOST"
        )
    found = [checks.integers("addrs", one, least=1) for one in addrs]
    for one in found:
        if len(one) != cache_desc.num_tensors:
            raise LLMParamError(
                f"{len(one)} addrs are given for {cache_desc.num_tensors} tensors; give one each"
            )
    return found
