"""The caches of this process: the table of references and the memory behind them.

    caches = LocalCaches(options, settings)
    entry = Entry(desc, is_blocks=False)
    caches.allocate(entry, keys=[CacheKey(1, 7)])
    with caches.held(entry): ...          # a free does not release the memory here
    caches.deallocate(entry.cache_id); caches.close()

Used by both generations' managers and by requests of peers. Lock order: the table's lock, then a
pool's. The lock is not held during copies or waits for memory.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.datadist import wire
from kvelastic.datadist.byte_copies import copy_runs
from kvelastic.datadist.cache_layout import Run
from kvelastic.datadist.cache_memory import CacheMemory, name_streams
from kvelastic.datadist.cache_table import CacheTable, Entry, Piece, not_there
from kvelastic.datadist.descriptors import CacheDesc, CacheKey
from kvelastic.datadist.enums import Placement
from kvelastic.datadist.memory_config import MemPool
from kvelastic.datadist.options import Options
from kvelastic.datadist.status import LLMException, LLMParamError, LLMStatusCode, failure
from kvelastic.device import selection
from kvelastic.device.selection import Device
from kvelastic.errors import DeviceUnavailableError, NotRegisteredError
from kvelastic.transfer import Link

MAX_REGISTERED_ADDRESSES = 240
"""Maximum over all registered caches of a process, as in the original."""


class LocalCaches(CacheTable):
    """Table and memory of the process's caches. Any thread may call."""

    def __init__(self, options: Options, settings: Config) -> None:
        """Open the pools in `options`. Maps no memory. Raises what `open_pool` raises."""
        super().__init__()
        self._options = options
        self._copying = threading.Lock()
        self._unused = threading.Condition(self._lock)
        self._deleted: deque[int] = deque()
        self.devices: list[Device] = []
        self._memories: dict[Placement, list[CacheMemory]] = {}
        try:
            for at in options.device_ids:
                self.devices.append(_device(settings, at))
                name_streams(self.devices[-1])
            if options.device_pool is not None:
                self._open(Placement.DEVICE, self.devices, options.device_pool, settings)
            if options.host_pool is not None:
                host = [selection.host(settings)]
                self._open(Placement.HOST, host, options.host_pool, settings)
        except BaseException:
            self.close()
            raise

    def _open(
        self, placement: Placement, devices: Sequence[Device], pool: MemPool, settings: Config
    ) -> None:
        opened = self._memories.setdefault(placement, [])
        for at, one in enumerate(devices):
            number = f"_{at}" if len(devices) > 1 else ""
            memory = CacheMemory(
                one,
                pool,
                settings,
                wait_s=self._options.sync_kv_timeout_s,
                tiers=self._options.tiers,
                name=settings.ipc_name and f"{settings.ipc_name}_{placement.name.lower()}{number}",
            )
            opened.append(memory)

    # --- make and forget ---------------------------------------------------------------------

    def allocate(self, entry: Entry, keys: Sequence[CacheKey]) -> None:
        """Allocate memory for a new cache, on each device if it is a device cache.

        Waits up to the timeout of a call for memory of other instances. Raises
        `LLM_FEATURE_NOT_ENABLED` if no pool is configured, `LLM_OUT_OF_MEMORY`
        (`LLM_DEVICE_OUT_OF_MEMORY` in the first generation), and errors of
        `CacheTable.refuse_keys`. After an error nothing has changed.
        """
        self.free_deleted()
        desc = entry.desc
        memories = self._memories.get(desc.placement)
        if memories is None:
            option = "mem_pool_cfg" if desc.placement is Placement.DEVICE else "host_mem_pool_cfg"
            raise failure(
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                f"there is no pool of {desc.placement.name} caches; set {option} before init",
            )
        self.refuse_keys(entry, keys)
        with ExitStack() as undo:
            pieces: list[Piece] = []
            for memory in memories:
                piece = memory.alloc(desc.num_tensors, desc.size)
                if piece is None:
                    raise self._out_of_memory(desc, memory)
                undo.callback(piece.free)
                pieces.append(piece)
            entry.memory = tuple(pieces)
            entry.addrs = tuple(piece.addresses for piece in pieces)
            with self._lock:
                self._add(entry, keys)
            undo.pop_all()

    def _out_of_memory(self, desc: CacheDesc, memory: CacheMemory) -> LLMException:
        state = memory.pool.blocks.limit_state()
        return failure(
            LLMStatusCode.LLM_OUT_OF_MEMORY
            if self._options.is_cache_manager
            else LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
            f"{desc.num_tensors} tensors of {desc.size} bytes are not available in"
            f" {memory.pool.name}, which holds {state['mapped_bytes']} of"
            f" {state['effective_limit_bytes']} bytes; deallocate caches, or raise its limit",
        )

    def register(self, entry: Entry, keys: Sequence[CacheKey]) -> None:
        """Register a new cache over the caller's memory. Raises `LLMParamError`."""
        self.free_deleted()
        (addrs,) = entry.addrs
        tensors = entry.desc.num_tensors
        if len(addrs) != tensors:
            raise LLMParamError(
                f"{len(addrs)} addresses are given for {tensors} tensors; give one each"
            )
        with self._lock:
            known = sum(len(one.addrs[0]) for one in self._by_id.values() if one.is_registered)
            if known + len(addrs) > MAX_REGISTERED_ADDRESSES:
                raise LLMParamError(
                    f"{known} addresses are registered: with {len(addrs)} more they would be over"
                    f" {MAX_REGISTERED_ADDRESSES}"
                )
            self._add(entry, keys)

    def deallocate(self, cache_id: int) -> bool:
        """Drop the reference of an allocated cache's id; an unknown id is ignored.

        Returns False, and changes nothing, if the cache is registered.
        """
        self.free_deleted()
        with self._lock:
            entry = self._by_id.get(cache_id)
            if entry is not None and entry.is_registered:
                return False
            self._release_id(entry)
            return True

    def delete_later(self, cache_id: int) -> None:
        """Drop an id's reference from the deletion of a handle, in any thread at any time.

        Never waits for a lock, because the same thread may hold it.
        """
        self._deleted.append(cache_id)
        self.free_deleted()

    def free_deleted(self) -> None:
        """Process the ids that `delete_later` could not, unless the lock is held."""
        while self._deleted and self._lock.acquire(blocking=False):
            try:
                while self._deleted:
                    self._release_id(self._by_id.get(self._deleted.popleft()))
            finally:
                self._lock.release()

    def unregister(self, cache_id: int) -> Entry | None:
        """Drop a registered cache and its keys; return None if the id is unknown.

        Waits up to `sync_kv_timeout` until the cache is unused (else `LLM_TIMEOUT`). Raises
        `LLMParamError` for an allocated cache.
        """
        with self._lock:
            entry = self._by_id.get(cache_id)
            if entry is None:
                return None
            if not entry.is_registered:
                raise LLMParamError(f"cache {cache_id} was allocated; deallocate it")
            if not self._unused.wait_for(lambda: not entry.uses, self._options.sync_kv_timeout_s):
                raise failure(
                    LLMStatusCode.LLM_TIMEOUT,
                    f"cache {cache_id} is being transferred; unlink its peers, or try again",
                )
            if self._by_id.get(cache_id) is not entry:  # another thread was first
                return None
            for index in list(entry.rows):
                self._drop_row(entry, index)
            self._release_id(entry)
            return entry

    # --- hold and copy -----------------------------------------------------------------------

    def refuse_foreign(self, name: str, entry: Entry) -> None:
        """Check that the argument `name` is a cache of the table.

        Raises `LLM_KV_CACHE_NOT_EXIST` if it was deallocated, and `LLMParamError` for a CPU cache.
        """
        if entry.is_cpu_cache:
            raise LLMParamError(f"{name} is a CPU cache; the call needs one of this manager")
        with self._lock:
            self._refuse_gone(entry)

    def _refuse_gone(self, entry: Entry) -> None:
        if self._by_id.get(entry.cache_id) is not entry:
            raise not_there(f"cache {entry.cache_id} was deallocated")

    @contextmanager
    def held(self, entry: Entry) -> Iterator[None]:
        """Pin an allocated cache's memory, or keep a registered cache registered, in this context.

        Does nothing for a CPU cache. Raises `LLM_KV_CACHE_NOT_EXIST` if the cache is gone.
        """
        with self._lock:
            if not entry.is_cpu_cache:
                self._refuse_gone(entry)
            tickets = [(piece, piece.pin()) for piece in entry.memory or ()]
            entry.uses += 1
        try:
            yield
        finally:
            with self._lock:
                entry.uses -= 1
                self._unused.notify_all()
            for piece, ticket in tickets:
                piece.unpin(ticket)

    def claim(self, link: Link, claim: bytes, pieces: Sequence[tuple[int, int]]) -> ClaimedCaches:
        """Hold the cache that a peer's copy claims; if none, every cache that contains a piece.

        Raises `NotRegisteredError` if a piece is not entirely in a tensor of such a cache.
        """
        cache_id = wire.claimed_cache(claim)
        with self._lock:
            entries = [
                entry
                for entry in self._by_id.values()
                if entry.remote_accessible and cache_id in {None, entry.cache_id}
            ]
        spans = sorted(
            (address, address + entry.desc.size, entry.cache_id)
            for entry in entries
            for addrs in entry.addrs
            for address in addrs
        )
        found: set[int] = set()
        for address, size in pieces:
            at = bisect_right(spans, (address, 1 << 64, 0)) - 1
            if at < 0 or address + size > spans[at][1]:
                raise NotRegisteredError(
                    f"{size} bytes at {address:#x} are of no cache that peers reach"
                    if cache_id is None
                    else f"cache {cache_id} has gone, or does not have {size} bytes at {address:#x}"
                )
            found.add(spans[at][2])
        with ClaimedCaches() as uses:
            try:
                for entry in entries:
                    if entry.cache_id in found:
                        uses.enter_context(self.held(entry))
            except LLMException as error:
                raise NotRegisteredError(f"it has just gone: {error}") from error
            return uses.pop_all()

    def copy(self, pairs: Sequence[tuple[Run, Run]], source: Entry, target: Entry) -> None:
        """Copy runs of one cache to another on each device. Blocks; one copy runs at a time.

        Raises as `copy_runs` does, with `LLM_TIMEOUT` after the timeout of a call.
        """
        deadline_s = time.monotonic() + self._options.sync_kv_timeout_s
        with self._copying, self.held(source), self.held(target):
            source.check_devices(target.addrs)
            trusted = not (source.is_registered or target.is_registered)
            placements = {source.desc.placement, target.desc.placement}
            for at, (of, to) in enumerate(zip(source.addrs, target.addrs, strict=True)):
                gpu = self.gpu(at) if Placement.DEVICE in placements else None
                copy_runs(pairs, of, to, trusted=trusted, gpu=gpu, deadline_s=deadline_s)

    def gpu(self, at: int) -> _vmm.CudaDriver | None:
        """Return the driver of the at-th device; None if the host replaces it."""
        driver = self.devices[at].driver()
        return driver if isinstance(driver, _vmm.CudaDriver) else None

    # --- life --------------------------------------------------------------------------------

    def pools(self) -> list[CacheMemory]:
        """Return all pools of caches."""
        return [memory for each in self._memories.values() for memory in each]

    def check_integrity(self) -> None:
        """Check that table and pools agree. Call it only while no other call is in progress."""
        with self._lock:
            self._check_references()
            pieces = [piece for entry in self._by_id.values() for piece in entry.memory or ()]
            for memory in self.pools():
                memory.check_integrity([piece for piece in pieces if piece.pool is memory.pool])

    def close(self) -> None:
        """Drop all caches, release all memory and leave the ledgers. Idempotent."""
        with self._lock:
            for each in (self._by_id, self._by_row, self._by_model, self._deleted):
                each.clear()
        for memory in self.pools():
            memory.close()


class ClaimedCaches(ExitStack):
    """Caches held while a peer copies: a `Hold` of `kvelastic.transfer`."""

    def is_whole(self) -> bool:
        """True: their memory cannot be reused while they are held."""
        return True

    def release(self) -> None:
        """End the hold after the copy."""
        self.close()


def _device(settings: Config, device_id: int) -> Device:
    """Return the GPU of this number, or the host if there is no GPU."""
    if settings.device in {"host", "cpu"}:
        return selection.host(settings)
    try:
        return selection.resolve(f"cuda:{device_id}", settings)
    except DeviceUnavailableError:
        if settings.device != selection.AUTO:
            raise
        return selection.host(settings)
