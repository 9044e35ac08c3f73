"""The caches of this process: the table of references, lookup by key, and holds during copies.

    caches = LocalCaches(options, settings)
    entry = Entry(desc, is_blocks=False)
    caches.allocate(entry, keys=[CacheKey(1, 7)])
    with caches.held(entry): ...          # a free does not release the memory here
    caches.deallocate(entry.cache_id); caches.close()

An allocated cache is referenced by its id and by each of its keys. Its memory is released with the
last reference:

    id     dropped by deallocate_cache
    key    dropped by remove_cache_key; a request's key also when a peer has copied its whole row

A registered cache uses its caller's memory; `unregister_cache` drops it and its keys at once. A
blocks cache has one key, which is valid only while its id is.

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
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.datadist import wire
from kvelastic.datadist.byte_copies import copy_runs
from kvelastic.datadist.cache_layout import Run
from kvelastic.datadist.cache_memory import CachePools, Piece
from kvelastic.datadist.descriptors import BlocksCacheKey, CacheDesc, CacheKey, Index
from kvelastic.datadist.enums import Placement
from kvelastic.datadist.options import Options
from kvelastic.datadist.status import LLMException, LLMParamError, LLMStatusCode, failure
from kvelastic.errors import IntegrityError, NotRegisteredError
from kvelastic.transfer import Link

MAX_CACHES: Final = 1 << 20
MAX_REGISTERED_ADDRESSES: Final = 240
"""Maximum over all registered caches of a process, as in the original."""
NO_CACHE_ID: Final = -1
"""The id of a CPU cache, which no manager knows."""
Keys: TypeAlias = Sequence[CacheKey | BlocksCacheKey]
"""Keys of a new cache: of its rows, or one of a blocks cache."""


@dataclass(eq=False)
class Entry:
    """A cache of this process. The table has all but CPU caches."""

    desc: CacheDesc
    is_blocks: bool
    """Whether its rows are blocks."""
    addrs: tuple[tuple[int, ...], ...] = ()
    """Addresses by device, then by tensor."""
    memory: tuple[Piece, ...] | None = None
    """By device; None if the memory is the caller's."""
    remote_accessible: bool = True
    cache_id: int = NO_CACHE_ID
    """Set by the table."""
    has_id: bool = True
    """Whether the id still references the cache."""
    rows: dict[Index, int] = field(default_factory=dict)
    """Keys that still reference the cache, with their rows."""
    moved: dict[Index, set[int]] = field(default_factory=dict)
    """Tensors of a key's row that peers have copied."""
    uses: int = 0
    """Number of copies and transfers in progress that use the cache."""

    @property
    def is_registered(self) -> bool:
        """Whether the memory is the caller's."""
        return self.memory is None

    @property
    def is_cpu_cache(self) -> bool:
        """Whether `create_cpu_cache` created it. It is used by blocks or by rows."""
        return self.cache_id == NO_CACHE_ID

    def check_devices(self, other: Sequence[Sequence[int]]) -> None:
        """Raise `LLMParamError` unless a cache with `other` addresses is on as many devices."""
        if len(self.addrs) != len(other):
            raise LLMParamError(f"the caches are on {len(self.addrs)} and {len(other)} devices")


class LocalCaches:
    """Table and memory of the process's caches. Any thread may call."""

    def __init__(self, options: Options, settings: Config) -> None:
        """Open the pools in `options`. Maps no memory. Raises what `open_pool` raises."""
        self._options = options
        self._lock = threading.Lock()
        self._unused = threading.Condition(self._lock)
        self._copying = threading.Lock()
        self._next_id = 1
        self._by_id: dict[int, Entry] = {}
        self._by_key: dict[Index, Entry] = {}
        self._deleted: deque[int] = deque()
        self.pools: Final = CachePools(options, settings)

    # --- make and forget ---------------------------------------------------------------------

    def allocate(self, entry: Entry, keys: Keys) -> None:
        """Allocate memory for a new cache, on each device if it is a device cache.

        Waits up to the timeout of a call for memory of other instances. Raises
        `LLM_FEATURE_NOT_ENABLED` if no pool is configured, `LLM_OUT_OF_MEMORY`
        (`LLM_DEVICE_OUT_OF_MEMORY` in the first generation), `LLMParamError` for more keys than
        rows or a key in use, and `LLM_PREFIX_ALREADY_EXIST` for a prefix in use. After an error
        nothing has changed.
        """
        self.free_deleted()
        self.pools.of(entry.desc.placement)  # raises first if there is no pool
        with self._lock:
            self._rows_of_keys(entry, keys)
        entry.memory = self.pools.alloc(entry.desc)
        entry.addrs = tuple(piece.addresses for piece in entry.memory)
        try:
            with self._lock:
                self._add(entry, keys)
        except BaseException:
            for piece in entry.memory:
                piece.free()
            raise

    def register(self, entry: Entry, keys: Keys) -> None:
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
                self._drop_key(entry, index)
            self._release_id(entry)
            return entry

    def _rows_of_keys(self, entry: Entry, keys: Keys) -> dict[Index, int]:
        """Check keys; return the row of each. Placeholders get none, the last of equals counts."""
        if len(keys) > entry.desc.batch_size:
            raise LLMParamError(
                f"{len(keys)} cache_keys are given for {entry.desc.batch_size} rows; give one each"
            )
        rows = {key.index: row for row, key in enumerate(keys) if not key.is_placeholder}
        for index in rows.keys() & self._by_key.keys():
            if index.kind == "blocks":
                raise LLMParamError(f"model {index.value} has a blocks cache already")
            why = f"{index.kind} {index.value} of model {index.detail} is a cache's key already"
            if index.kind == "prefix":
                raise failure(LLMStatusCode.LLM_PREFIX_ALREADY_EXIST, why)
            raise LLMParamError(f"{why}; remove it first")
        if len(self._by_id) >= MAX_CACHES:
            raise failure(
                LLMStatusCode.LLM_OUT_OF_MEMORY, f"there are {MAX_CACHES} caches; deallocate some"
            )
        return rows

    def _add(self, entry: Entry, keys: Keys) -> None:
        """Add a cache under a new id; `_lock` is held. On an error nothing has changed."""
        entry.rows = self._rows_of_keys(entry, keys)
        entry.cache_id = self._next_id
        self._next_id += 1
        self._by_id[entry.cache_id] = entry
        self._by_key.update(dict.fromkeys(entry.rows, entry))

    def _release_id(self, entry: Entry | None) -> None:
        """Drop the id's reference, if there is one; `_lock` is held."""
        if entry is not None and entry.has_id:
            entry.has_id = False
            for index in [one for one in entry.rows if one.kind == "blocks"]:
                self._drop_key(entry, index)
            self._free_if_unreferenced(entry)

    def remove_key(self, index: Index) -> None:
        """Drop a key's reference; an unknown key is ignored."""
        with self._lock:
            entry = self._by_key.get(index)
            if entry is not None:
                self._drop_key(entry, index)
                self._free_if_unreferenced(entry)

    def moved(self, cache_id: int, row: int, tensors: Sequence[int]) -> None:
        """Record that a peer has copied these tensors of a row.

        After the row's last tensor, its request keys are dropped. Prefix keys and keys of
        registered caches stay.
        """
        with self._lock:
            entry = self._by_id.get(cache_id)
            if entry is None or entry.is_registered:
                return
            for index in [one for one, at in entry.rows.items() if at == row]:
                if index.kind == "request":
                    had = entry.moved.setdefault(index, set())
                    had.update(one for one in tensors if one < entry.desc.num_tensors)
                    if len(had) >= entry.desc.num_tensors:
                        self._drop_key(entry, index)
            self._free_if_unreferenced(entry)

    def _drop_key(self, entry: Entry, index: Index) -> None:
        del entry.rows[index], self._by_key[index]
        entry.moved.pop(index, None)

    def _free_if_unreferenced(self, entry: Entry) -> None:
        if not entry.has_id and not entry.rows:
            del self._by_id[entry.cache_id]
            for piece in entry.memory or ():
                piece.free()

    # --- find --------------------------------------------------------------------------------

    def of_id(self, cache_id: int) -> Entry:
        """Return the cache of a valid id. Raises `LLM_KV_CACHE_NOT_EXIST`."""
        with self._lock:
            entry = self._by_id.get(cache_id)
        if entry is None or not entry.has_id:
            raise not_there(f"there is no cache of id {cache_id}")
        return entry

    def of_key(self, index: Index) -> tuple[Entry, int]:
        """Return the cache and row of a key.

        Raises `LLM_KV_CACHE_NOT_EXIST`, or `LLM_PREFIX_NOT_EXIST` for a prefix.
        """
        if index.kind == "row":
            return self.of_id(index.value), index.detail
        with self._lock:
            entry = self._by_key.get(index)
            if entry is not None:
                return entry, entry.rows[index]
        if index.kind == "blocks":
            raise not_there(f"no blocks cache has model {index.value} as its key")
        subject = f"no cache has {index.kind} {index.value} of model {index.detail} as its key"
        if index.kind == "prefix":
            raise failure(LLMStatusCode.LLM_PREFIX_NOT_EXIST, subject)
        raise not_there(f"{subject}: it was pulled or removed, or never was")

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
            tickets = [(piece, piece.pool.blocks.pin(piece.blocks)) for piece in entry.memory or ()]
            entry.uses += 1
        try:
            yield
        finally:
            with self._lock:
                entry.uses -= 1
                self._unused.notify_all()
            for piece, ticket in tickets:
                piece.pool.blocks.unpin(ticket)

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
        driver = self.pools.devices[at].driver()
        return driver if isinstance(driver, _vmm.CudaDriver) else None

    # --- life --------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check that table and pools agree. Call it only while no other call is in progress."""
        with self._lock:
            self._check_references()
            pieces = [piece for entry in self._by_id.values() for piece in entry.memory or ()]
            for memory in self.pools:
                memory.check_integrity([piece for piece in pieces if piece.pool is memory.pool])

    def _check_references(self) -> None:
        """Raise `IntegrityError` if references and caches disagree or a cache has no reference."""
        keys = {index: entry for entry in self._by_id.values() for index in entry.rows}
        if keys != self._by_key:
            raise IntegrityError("keys lead to other caches than those that have them")
        for cache_id, entry in self._by_id.items():
            if entry.cache_id != cache_id or not (entry.has_id or entry.rows):
                raise IntegrityError(f"cache {cache_id} is kept, and nothing refers to it")
            if not entry.moved.keys() <= entry.rows.keys():
                raise IntegrityError(f"cache {cache_id} counts tensors of a key it has not")

    def close(self) -> None:
        """Drop all caches, release all memory and leave the ledgers. Idempotent."""
        with self._lock:
            for each in (self._by_id, self._by_key, self._deleted):
                each.clear()
        self.pools.close()


def not_there(message: str) -> LLMException:
    """Return the exception for a cache that does not exist."""
    return failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, message)


class ClaimedCaches(ExitStack):
    """Caches held while a peer copies: a `Hold` of `kvelastic.transfer`."""

    def is_whole(self) -> bool:
        """True: their memory cannot be reused while they are held."""
        return True

    def release(self) -> None:
        """End the hold after the copy."""
        self.close()
