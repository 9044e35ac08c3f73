"""The caches of this process: the table of references and the memory behind them.

    caches = LocalCaches(options, settings)
    entry = caches.allocate(desc, keys=[CacheKey(1, 7)])
    with caches.held(entry): ...          # a free does not release the memory here
    caches.deallocate(entry.cache_id); caches.close()

Used by both generations' managers and by requests of peers. Any thread may call. Lock order: this
class's lock, then a pool's. The lock is not held during copies or waits for memory.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.datadist.byte_copies import copy_runs
from kvelastic.datadist.cache_layout import Run
from kvelastic.datadist.cache_memory import CacheMemory, Piece, name_streams
from kvelastic.datadist.cache_table import CacheTable, Entry
from kvelastic.datadist.caches import CacheHandle
from kvelastic.datadist.descriptors import CacheDesc, CacheKey, RowIndex
from kvelastic.datadist.enums import Placement
from kvelastic.datadist.options import Options
from kvelastic.datadist.status import LLMException, LLMParamError, LLMStatusCode, failure
from kvelastic.device import selection
from kvelastic.device.selection import Device
from kvelastic.errors import DeviceUnavailableError, NotRegisteredError

MAX_REGISTERED_ADDRESSES = 240
"""Maximum over all registered caches of a process, as in the original."""


class LocalCaches:
    """Table and memory of the process's caches. Any thread may call."""

    def __init__(self, options: Options, settings: Config) -> None:
        """Open the pools in `options`. Maps no memory. Raises what `open_pool` raises."""
        self._options = options
        self._copying = threading.Lock()
        self._lock = threading.Lock()
        self._unused = threading.Condition(self._lock)
        self._table = CacheTable()
        self._deleted: deque[int] = deque()
        self._registered_addresses = 0
        self._closed = False
        self.devices: list[Device] = []
        self._memories: dict[Placement, list[CacheMemory]] = {}
        try:
            for at in options.device_ids:
                self.devices.append(_device(settings, at))
                name_streams(self.devices[-1])
            if options.device_pool is not None:
                self._open(Placement.DEVICE, self.devices, settings)
            if options.host_pool is not None:
                self._open(Placement.HOST, [selection.host(settings)], settings)
        except BaseException:
            self.close()
            raise

    def _open(self, placement: Placement, devices: Sequence[Device], settings: Config) -> None:
        options = self._options
        pool = options.device_pool if placement is Placement.DEVICE else options.host_pool
        assert pool is not None
        opened = self._memories.setdefault(placement, [])
        for at, one in enumerate(devices):
            number = f"_{at}" if len(devices) > 1 else ""
            name = settings.ipc_name and f"{settings.ipc_name}_{placement.name.lower()}{number}"
            opened.append(
                CacheMemory(
                    one,
                    pool,
                    settings,
                    wait_s=options.sync_kv_timeout_s,
                    tiers=options.tiers,
                    name=name,
                )
            )

    # --- make and forget ---------------------------------------------------------------------

    def allocate(
        self,
        desc: CacheDesc,
        *,
        keys: Sequence[CacheKey] = (),
        model_id: int | None = None,
        is_blocks: bool = False,
    ) -> Entry:
        """Allocate a cache; a device cache gets memory on each device.

        Waits up to the timeout of a call for memory of other instances. Raises
        `LLM_FEATURE_NOT_ENABLED` if no pool is configured, `LLM_OUT_OF_MEMORY`
        (`LLM_DEVICE_OUT_OF_MEMORY` in the first generation), and errors of
        `CacheTable.refuse_keys`. After an error nothing has changed.
        """
        self.free_deleted()
        memories = self._memories.get(desc.placement)
        if memories is None:
            option = "mem_pool_cfg" if desc.placement is Placement.DEVICE else "host_mem_pool_cfg"
            raise failure(
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                f"there is no pool of {desc.placement.name} caches; set {option} before init",
            )
        with self._lock:
            self._table.refuse_keys(desc, keys, model_id)
        pieces: list[Piece] = []
        try:
            for memory in memories:
                piece = memory.alloc(desc.num_tensors, desc.size)
                if piece is None:
                    raise self._out_of_memory(desc, memory)
                pieces.append(piece)
            with self._lock:
                return self._table.add(
                    desc,
                    [piece.addresses for piece in pieces],
                    memory=tuple(pieces),
                    is_blocks=is_blocks,
                    keys=keys,
                    model_id=model_id,
                )
        except BaseException:
            for memory, piece in zip(memories, pieces, strict=False):
                memory.free(piece)
            raise

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

    def register(
        self,
        desc: CacheDesc,
        addrs: Sequence[int],
        *,
        remote_accessible: bool,
        keys: Sequence[CacheKey] = (),
        model_id: int | None = None,
        is_blocks: bool = False,
    ) -> Entry:
        """Register a cache over the caller's memory. Raises `LLMParamError`."""
        self.free_deleted()
        if len(addrs) != desc.num_tensors:
            raise LLMParamError(
                f"{len(addrs)} addresses are given for {desc.num_tensors} tensors; give one each"
            )
        with self._lock:
            if self._registered_addresses + len(addrs) > MAX_REGISTERED_ADDRESSES:
                raise LLMParamError(
                    f"{self._registered_addresses} addresses are registered: with {len(addrs)}"
                    f" more they would be over {MAX_REGISTERED_ADDRESSES}"
                )
            entry = self._table.add(
                desc,
                [addrs],
                is_blocks=is_blocks,
                remote_accessible=remote_accessible,
                keys=keys,
                model_id=model_id,
            )
            self._registered_addresses += len(addrs)
            return entry

    def deallocate(self, cache_id: int) -> bool:
        """Drop the reference of an allocated cache's id; an unknown id is ignored.

        Returns False, and changes nothing, if the cache is registered.
        """
        self.free_deleted()
        with self._lock:
            entry = self._table.get(cache_id)
            if entry is not None and entry.is_registered:
                return False
            self._free(self._table.release_id(cache_id))
            return True

    def delete_later(self, cache_id: int) -> None:
        """Drop an id's reference from the deletion of a handle, in any thread at any time.

        Never waits for a lock, because the same thread may hold it.
        """
        if not self._closed:
            self._deleted.append(cache_id)
            self.free_deleted()

    def free_deleted(self) -> None:
        """Process the ids that `delete_later` could not, unless the lock is held."""
        while self._deleted and self._lock.acquire(blocking=False):
            try:
                while self._deleted:
                    self._free(self._table.release_id(self._deleted.popleft()))
            finally:
                self._lock.release()

    def unregister(self, cache_id: int) -> Entry | None:
        """Drop a registered cache; return None if the id is unknown.

        Waits up to `sync_kv_timeout` until the cache is unused (else `LLM_TIMEOUT`). Raises
        `LLMParamError` for an allocated cache.
        """
        with self._lock:
            entry = self._table.get(cache_id)
            if entry is None:
                return None
            if not entry.is_registered:
                raise LLMParamError(f"cache {cache_id} was allocated; deallocate it")
            if not self._unused.wait_for(lambda: not entry.uses, self._options.sync_kv_timeout_s):
                raise failure(
                    LLMStatusCode.LLM_TIMEOUT,
                    f"cache {cache_id} is being transferred; unlink its peers, or try again",
                )
            forgotten = self._table.forget(cache_id)
            if forgotten is not None:  # another thread may have been first
                self._registered_addresses -= len(forgotten.addrs[0])
            return forgotten

    def remove_key(self, index: RowIndex) -> None:
        """Drop a key's reference; an unknown key is ignored."""
        with self._lock:
            self._free(self._table.remove_key(index))

    def moved(self, cache_id: int, row: int, tensors: Sequence[int]) -> None:
        """Record that a peer has copied tensors of a row. See `CacheTable.moved`."""
        with self._lock:
            self._free(self._table.moved(cache_id, row, tensors))

    def _free(self, entry: Entry | None) -> None:
        """Free the cache's memory; pinned memory follows with its last pin. The lock is held."""
        for memory, piece in () if entry is None else self._pieces_of(entry):
            memory.free(piece)

    def _pieces_of(self, entry: Entry) -> Iterable[tuple[CacheMemory, Piece]]:
        """Return the pool and the piece on each device; nothing for a registered cache."""
        if entry.memory is None:
            return ()
        return zip(self._memories[entry.desc.placement], entry.memory, strict=True)

    # --- find and hold -----------------------------------------------------------------------

    def of_id(self, cache_id: int) -> Entry:
        """Return the cache of a valid id. Raises `LLM_KV_CACHE_NOT_EXIST`."""
        with self._lock:
            return self._table.of_id(cache_id)

    def of_row(self, index: RowIndex) -> tuple[Entry, int]:
        """Return the cache and row of a key.

        Raises `LLM_KV_CACHE_NOT_EXIST`, or `LLM_PREFIX_NOT_EXIST` for a prefix.
        """
        with self._lock:
            return self._table.of_row(index)

    def of_model(self, model_id: int) -> Entry:
        """Return the blocks cache of a model. Raises `LLM_KV_CACHE_NOT_EXIST`."""
        with self._lock:
            return self._table.of_model(model_id)

    def own(self, name: str, handle: CacheHandle) -> Entry:
        """Return the cache of a handle that is the argument `name`.

        Raises `LLM_KV_CACHE_NOT_EXIST` if it was deallocated, and `LLMParamError` for a CPU cache.
        """
        if handle.is_cpu_cache:
            raise LLMParamError(f"{name} is a CPU cache; the call needs one of this manager")
        if not handle.is_valid:
            raise failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, f"{name} was deallocated")
        return self.of_id(handle.cache_id)

    @contextmanager
    def held(self, entry: Entry) -> Iterator[None]:
        """Pin an allocated cache's memory, or keep a registered cache registered, in this context.

        Raises `LLM_KV_CACHE_NOT_EXIST` if the cache is gone.
        """
        with self._lock:
            self._table.still_there(entry)
            tickets = [(memory, memory.pin(piece)) for memory, piece in self._pieces_of(entry)]
            entry.uses += 1
        try:
            yield
        finally:
            with self._lock:
                entry.uses -= 1
                self._unused.notify_all()
            for memory, ticket in tickets:
                memory.unpin(ticket)

    def claim(self, cache_id: int | None, pieces: Sequence[tuple[int, int]]) -> ClaimedCaches:
        """Hold the cache that a peer's copy means; if None, every cache that contains a piece.

        Raises `NotRegisteredError` if a piece is not entirely in a tensor of such a cache.
        """
        with self._lock:
            entries = [
                entry
                for entry in self._table
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
        with ExitStack() as uses:
            try:
                for entry in entries:
                    if entry.cache_id in found:
                        uses.enter_context(self.held(entry))
            except LLMException as error:
                raise NotRegisteredError(f"it has just gone: {error}") from error
            return ClaimedCaches(uses.pop_all())

    def copy(
        self, pairs: Sequence[tuple[Run, Run]], source: CacheHandle, target: CacheHandle
    ) -> None:
        """Copy runs of one cache to another on each device. Blocks; one copy runs at a time.

        Raises as `copy_runs` does, with `LLM_TIMEOUT` after the timeout of a call.
        """
        deadline_s = time.monotonic() + self._options.sync_kv_timeout_s
        with (
            self._copying,
            self.held_handle("source", source) as of,
            self.held_handle("target", target) as to,
        ):
            if len(of) != len(to):
                raise LLMParamError(f"the caches are on {len(of)} and {len(to)} devices")
            trusted = self._is_own(source) and self._is_own(target)
            placements = {source.cache_desc.placement, target.cache_desc.placement}
            for at, (sources, targets) in enumerate(zip(of, to, strict=True)):
                gpu = self.gpu(at) if Placement.DEVICE in placements else None
                copy_runs(pairs, sources, targets, trusted=trusted, gpu=gpu, deadline_s=deadline_s)

    def _is_own(self, handle: CacheHandle) -> bool:
        return not handle.is_cpu_cache and not self.of_id(handle.cache_id).is_registered

    @contextmanager
    def held_handle(self, name: str, handle: CacheHandle) -> Iterator[Sequence[Sequence[int]]]:
        """Hold a cache in this context; yields its addresses by device, then by tensor."""
        if handle.is_cpu_cache:
            yield handle.device_addrs
            return
        entry = self.own(name, handle)
        with self.held(entry):
            yield entry.addrs

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
            self._table.check_integrity()
            for placement, memories in self._memories.items():
                held = [
                    entry.memory
                    for entry in self._table
                    if entry.memory is not None and entry.desc.placement is placement
                ]
                for at, memory in enumerate(memories):
                    memory.check_integrity([pieces[at] for pieces in held])

    def close(self) -> None:
        """Drop all caches, release all memory and leave the ledgers. Idempotent."""
        with self._lock:
            self._table = CacheTable()
            self._deleted.clear()
            self._closed = True
        for memory in self.pools():
            memory.close()


class ClaimedCaches:
    """Caches held while a peer copies: a `Hold` of `kvelastic.transfer`."""

    def __init__(self, uses: ExitStack) -> None:
        self._uses = uses

    def is_whole(self) -> bool:
        """True: their memory cannot be reused while they are held."""
        return True

    def release(self) -> None:
        """End the hold after the copy."""
        self._uses.close()


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
