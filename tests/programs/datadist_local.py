"""Managers of LLM-DataDist's interface with no peer: their local half.

manager = local_manager(device_bytes=64 << 20)
write(cache, tensor=0, offset=0, data=b"..."); read(cache, 0, 0, 16)
"""

from __future__ import annotations

import ctypes

from kvelastic.config import load
from kvelastic.datadist.caches import CacheHandle
from kvelastic.datadist.enums import LLMRole
from kvelastic.datadist.exposed import Exposed
from kvelastic.datadist.first_generation import KvCacheManager
from kvelastic.datadist.links import Links
from kvelastic.datadist.local_caches import Entry, LocalCaches
from kvelastic.datadist.managers import CacheManager
from kvelastic.datadist.options import Options, read_options
from kvelastic.datadist.status import LLMException, LLMStatusCode


class NothingExposed(Exposed):
    """No peer reaches anything."""

    def __init__(self) -> None:
        pass

    def expose(self, entry: Entry) -> None:
        pass

    def withdraw(self, entry: Entry) -> None:
        pass


class NoPeers(Links):
    """No peer is linked."""

    def __init__(self) -> None:
        self.has_linked = False
        self.exposed = NothingExposed()

    def call(self, cluster_id: int, *, is_layered: bool = False):
        raise LLMException("nobody", status_code=LLMStatusCode.LLM_NOT_YET_LINK)


def second_options(device_bytes: int = 0, host_bytes: int = 0, **more: str) -> Options:
    """Of the second generation, with pools of so many bytes; none: no pool."""
    options = {"ge.exec.deviceId": "0", "llm.EnableCacheManager": "1"} | more
    if device_bytes:
        options["llm.MemPoolConfig"] = f'{{"memory_size": {device_bytes}}}'
    if host_bytes:
        options["llm.HostMemPoolConfig"] = f'{{"memory_size": {host_bytes}}}'
    return read_options(options, LLMRole.MIX)


def local_manager(options: Options) -> tuple[CacheManager, LocalCaches]:
    """A manager of the second generation."""
    caches = LocalCaches(options, load())
    return CacheManager(caches, NoPeers(), options), caches


def first_manager(
    options: dict[str, str], role: LLMRole = LLMRole.PROMPT
) -> tuple[KvCacheManager, LocalCaches]:
    """A manager of the first generation."""
    asked = read_options({"llm.listenIpInfo": "127.0.0.1:0"} | options, role)
    caches = LocalCaches(asked, load())
    return KvCacheManager(caches, NoPeers(), asked, role), caches


def write(cache: CacheHandle, tensor: int, offset: int, data: bytes, device: int = 0) -> None:
    ctypes.memmove(cache.device_addrs[device][tensor] + offset, data, len(data))


def read(cache: CacheHandle, tensor: int, offset: int, size: int, device: int = 0) -> bytes:
    return ctypes.string_at(cache.device_addrs[device][tensor] + offset, size)


class CallersMemory:
    """Memory of a caller's, as of a tensor; `addresses` of so many tensors."""

    def __init__(self, tensors: int, tensor_bytes: int) -> None:
        self._buffer = ctypes.create_string_buffer(tensors * tensor_bytes)
        base = ctypes.addressof(self._buffer)
        self.addresses = [base + at * tensor_bytes for at in range(tensors)]
