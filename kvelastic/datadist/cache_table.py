"""The process's caches and their table: references, and lookup by key.

An allocated cache is referenced by its id and by each of its keys. Its memory is released with the
last reference:

    id     dropped by deallocate_cache
    key    dropped by remove_cache_key; a request's key also when a peer has copied its whole row

A registered cache uses its caller's memory; `unregister_cache` drops it and its keys at once. A
blocks cache has one key, which is valid only while its id is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvelastic.datadist.descriptors import CacheDesc, CacheKey, RowIndex
from kvelastic.datadist.status import LLMException, LLMParamError, LLMStatusCode, failure
from kvelastic.errors import IntegrityError
from kvelastic.pool.pool import ElasticPool

MAX_CACHES: Final = 1 << 20
NO_CACHE_ID: Final = -1
"""The id of a CPU cache, which no manager knows."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Memory of a pool that a cache holds."""

    pool: ElasticPool
    addresses: tuple[int, ...]
    """Address of each tensor."""
    blocks: tuple[int, ...]

    def free(self) -> None:
        """Free the memory. What is pinned stays mapped until its last pin ends."""
        self.pool.blocks.free(self.blocks)

    def pin(self) -> int:
        """Pin the memory, so that a free does not release it before `unpin` of the ticket."""
        return self.pool.blocks.pin(self.blocks)

    def unpin(self, ticket: int) -> None:
        """End a pin. Idempotent."""
        self.pool.blocks.unpin(ticket)


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
    model_id: int | None = None
    """Key of a blocks cache."""
    rows: dict[RowIndex, int] = field(default_factory=dict)
    """Keys that still reference the cache, with their rows."""
    moved: dict[RowIndex, set[int]] = field(default_factory=dict)
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


class CacheTable:
    """Table of caches. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_id = 1
        self._by_id: dict[int, Entry] = {}
        self._by_row: dict[RowIndex, Entry] = {}
        self._by_model: dict[int, Entry] = {}

    # --- make and forget ---------------------------------------------------------------------

    def refuse_keys(self, entry: Entry, keys: Sequence[CacheKey]) -> None:
        """Check a new cache's keys.

        Raises `LLMParamError` for more keys than rows or a key in use, and
        `LLM_PREFIX_ALREADY_EXIST` for a prefix in use.
        """
        with self._lock:
            self._rows_of_keys(entry, keys)

    def _rows_of_keys(self, entry: Entry, keys: Sequence[CacheKey]) -> dict[RowIndex, int]:
        """Check keys; return the row of each. Placeholders get none, the last of equals counts."""
        if len(keys) > entry.desc.batch_size:
            raise LLMParamError(
                f"{len(keys)} cache_keys are given for {entry.desc.batch_size} rows; give one each"
            )
        rows = {key.index: row for row, key in enumerate(keys) if not key.is_placeholder}
        for index in rows.keys() & self._by_row.keys():
            why = f"{index.kind} {index.value} of model {index.model_id} is a cache's key already"
            if index.kind == "prefix":
                raise failure(LLMStatusCode.LLM_PREFIX_ALREADY_EXIST, why)
            raise LLMParamError(f"{why}; remove it first")
        if entry.model_id in self._by_model:
            raise LLMParamError(f"model {entry.model_id} has a blocks cache already")
        if len(self._by_id) >= MAX_CACHES:
            raise failure(
                LLMStatusCode.LLM_OUT_OF_MEMORY, f"there are {MAX_CACHES} caches; deallocate some"
            )
        return rows

    def _add(self, entry: Entry, keys: Sequence[CacheKey]) -> None:
        """Add a cache under a new id; `_lock` is held. On an error nothing has changed."""
        entry.rows = self._rows_of_keys(entry, keys)
        entry.cache_id = self._next_id
        self._next_id += 1
        self._by_id[entry.cache_id] = entry
        self._by_row.update(dict.fromkeys(entry.rows, entry))
        if entry.model_id is not None:
            self._by_model[entry.model_id] = entry

    def _release_id(self, entry: Entry | None) -> None:
        """Drop the id's reference, if there is one; `_lock` is held."""
        if entry is not None and entry.has_id:
            entry.has_id = False
            self._free_if_unreferenced(entry)

    def remove_key(self, index: RowIndex) -> None:
        """Drop a key's reference; an unknown key is ignored."""
        with self._lock:
            entry = self._by_row.get(index)
            if entry is not None:
                self._drop_row(entry, index)
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
                        self._drop_row(entry, index)
            self._free_if_unreferenced(entry)

    def _drop_row(self, entry: Entry, index: RowIndex) -> None:
        del entry.rows[index], self._by_row[index]
        entry.moved.pop(index, None)

    def _free_if_unreferenced(self, entry: Entry) -> None:
        if not entry.has_id and not entry.rows:
            del self._by_id[entry.cache_id]
            if entry.model_id is not None:
                del self._by_model[entry.model_id]
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

    def of_row(self, index: RowIndex) -> tuple[Entry, int]:
        """Return the cache and row of a key.

        Raises `LLM_KV_CACHE_NOT_EXIST`, or `LLM_PREFIX_NOT_EXIST` for a prefix.
        """
        with self._lock:
            entry = self._by_row.get(index)
            if entry is not None:
                return entry, entry.rows[index]
        subject = f"no cache has {index.kind} {index.value} of model {index.model_id} as its key"
        if index.kind == "prefix":
            raise failure(LLMStatusCode.LLM_PREFIX_NOT_EXIST, subject)
        raise not_there(f"{subject}: it was pulled or removed, or never was")

    def of_model(self, model_id: int) -> Entry:
        """Return the blocks cache of a model. Raises `LLM_KV_CACHE_NOT_EXIST`."""
        with self._lock:
            entry = self._by_model.get(model_id)
        if entry is None:
            raise not_there(f"no blocks cache has model {model_id} as its key")
        return entry

    def _check_references(self) -> None:
        """Raise `IntegrityError` if references and caches disagree or a cache has no reference."""
        rows = {index: entry for entry in self._by_id.values() for index in entry.rows}
        models = {
            entry.model_id: entry for entry in self._by_id.values() if entry.model_id is not None
        }
        if rows != self._by_row or models != self._by_model:
            raise IntegrityError("keys lead to other caches than those that have them")
        for cache_id, entry in self._by_id.items():
            if entry.cache_id != cache_id or not (entry.has_id or entry.rows):
                raise IntegrityError(f"cache {cache_id} is kept, and nothing refers to it")
            if not entry.moved.keys() <= entry.rows.keys():
                raise IntegrityError(f"cache {cache_id} counts tensors of a key it has not")


def not_there(message: str) -> LLMException:
    """Return the exception for a cache that does not exist."""
    return failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, message)
