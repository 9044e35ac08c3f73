"""Table of the process's caches: references and lookup by key. Pure: holds no memory.

An allocated cache is referenced by its id and by each of its keys. Its memory is released with the
last reference:

    id     dropped by deallocate_cache
    key    dropped by remove_cache_key; a request's key also when a peer has copied its whole row

A registered cache uses its caller's memory; `unregister_cache` drops it and its keys at once. A
blocks cache has one key, which is valid only while its id is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvelastic.datadist.descriptors import CacheDesc, CacheKey, RowIndex
from kvelastic.datadist.status import LLMException, LLMParamError, LLMStatusCode, failure
from kvelastic.errors import IntegrityError

if TYPE_CHECKING:
    from kvelastic.datadist.cache_memory import Piece

MAX_CACHES: Final = 1 << 20


@dataclass(eq=False)
class Entry:
    """A cache of this process."""

    cache_id: int
    desc: CacheDesc
    addrs: tuple[tuple[int, ...], ...]
    """Addresses by device, then by tensor."""
    memory: tuple[Piece, ...] | None
    """By device; None for a registered cache, whose memory is its caller's."""
    is_blocks: bool
    remote_accessible: bool
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
        """Whether the caller of `register_cache` owns the memory."""
        return self.memory is None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row or block in one tensor."""
        return self.desc.row_bytes


class CacheTable:
    """Table of caches. Not thread-safe: `LocalCaches` holds its lock."""

    def __init__(self) -> None:
        self._next_id = 1
        self._by_id: dict[int, Entry] = {}
        self._by_row: dict[RowIndex, Entry] = {}
        self._by_model: dict[int, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._by_id.values()))

    # --- make and forget ---------------------------------------------------------------------

    def refuse_keys(
        self, desc: CacheDesc, keys: Sequence[CacheKey], model_id: int | None
    ) -> dict[RowIndex, int]:
        """Check keys for a new cache and return the row of each; placeholders get none.

        The last of equal keys counts. Raises `LLMParamError` for more keys than rows or a key in
        use, and `LLM_PREFIX_ALREADY_EXIST` for a prefix in use.
        """
        if len(keys) > desc.batch_size:
            raise LLMParamError(
                f"{len(keys)} cache_keys are given for {desc.batch_size} rows; give one each"
            )
        rows = {key.index: row for row, key in enumerate(keys) if not key.is_placeholder}
        for index in rows:
            if index not in self._by_row:
                continue
            subject = f"{index.kind} {index.value} of model {index.model_id}"
            if index.kind == "prefix":
                raise failure(
                    LLMStatusCode.LLM_PREFIX_ALREADY_EXIST,
                    f"{subject} is the key of a cache already",
                )
            raise LLMParamError(f"{subject} is the key of a cache already; remove it first")
        if model_id is not None and model_id in self._by_model:
            raise LLMParamError(f"model {model_id} has a blocks cache already")
        if len(self._by_id) >= MAX_CACHES:
            raise failure(
                LLMStatusCode.LLM_OUT_OF_MEMORY, f"there are {MAX_CACHES} caches; deallocate some"
            )
        return rows

    def add(
        self,
        desc: CacheDesc,
        addrs: Sequence[Sequence[int]],
        *,
        memory: tuple[Piece, ...] | None = None,
        is_blocks: bool = False,
        remote_accessible: bool = True,
        keys: Sequence[CacheKey] = (),
        model_id: int | None = None,
    ) -> Entry:
        """Add a cache under a new id. On an error of `refuse_keys` nothing has changed."""
        rows = self.refuse_keys(desc, keys, model_id)
        entry = Entry(
            cache_id=self._next_id,
            desc=desc,
            addrs=tuple(tuple(one) for one in addrs),
            memory=memory,
            is_blocks=is_blocks,
            remote_accessible=remote_accessible,
            model_id=model_id,
            rows=rows,
        )
        self._next_id += 1
        self._by_id[entry.cache_id] = entry
        self._by_row.update(dict.fromkeys(rows, entry))
        if model_id is not None:
            self._by_model[model_id] = entry
        return entry

    def release_id(self, cache_id: int) -> Entry | None:
        """Drop the id's reference; return the cache if that was its last one."""
        entry = self._by_id.get(cache_id)
        if entry is None or not entry.has_id:
            return None
        entry.has_id = False
        return self._forget_if_free(entry)

    def forget(self, cache_id: int) -> Entry | None:
        """Drop a cache with all its references; return None if the id is unknown."""
        entry = self._by_id.get(cache_id)
        if entry is None:
            return None
        entry.has_id = False
        for index in list(entry.rows):
            self._drop_row(entry, index)
        return self._forget_if_free(entry)

    def remove_key(self, index: RowIndex) -> Entry | None:
        """Drop a key's reference; return the cache if that was its last one."""
        entry = self._by_row.get(index)
        if entry is None:
            return None
        self._drop_row(entry, index)
        return self._forget_if_free(entry)

    def moved(self, cache_id: int, row: int, tensors: Sequence[int]) -> Entry | None:
        """Record that a peer has copied these tensors of a row.

        After the row's last tensor, its request keys are dropped. Prefix keys and keys of
        registered caches stay. Returns the cache if that was its last reference.
        """
        entry = self._by_id.get(cache_id)
        if entry is None or entry.is_registered:
            return None
        done = [one for one, at in entry.rows.items() if at == row and one.kind == "request"]
        for index in done:
            had = entry.moved.setdefault(index, set())
            had.update(one for one in tensors if one < entry.desc.num_tensors)
            if len(had) >= entry.desc.num_tensors:
                self._drop_row(entry, index)
        return self._forget_if_free(entry)

    def _drop_row(self, entry: Entry, index: RowIndex) -> None:
        del entry.rows[index], self._by_row[index]
        entry.moved.pop(index, None)

    def _forget_if_free(self, entry: Entry) -> Entry | None:
        if entry.has_id or entry.rows:
            return None
        del self._by_id[entry.cache_id]
        if entry.model_id is not None:
            del self._by_model[entry.model_id]
        return entry

    # --- find --------------------------------------------------------------------------------

    def of_id(self, cache_id: int) -> Entry:
        """Return the cache of a valid id. Raises `LLM_KV_CACHE_NOT_EXIST`."""
        entry = self._by_id.get(cache_id)
        if entry is None or not entry.has_id:
            raise not_there(f"there is no cache of id {cache_id}")
        return entry

    def get(self, cache_id: int) -> Entry | None:
        """Return a cache by its id, even if only keys still reference it; None if it is gone."""
        return self._by_id.get(cache_id)

    def still_there(self, entry: Entry) -> None:
        """Raise `LLM_KV_CACHE_NOT_EXIST` if the cache was dropped."""
        if self._by_id.get(entry.cache_id) is not entry:
            raise not_there(f"cache {entry.cache_id} was deallocated meanwhile")

    def of_row(self, index: RowIndex) -> tuple[Entry, int]:
        """Return the cache and row of a key.

        Raises `LLM_KV_CACHE_NOT_EXIST`, or `LLM_PREFIX_NOT_EXIST` for a prefix.
        """
        entry = self._by_row.get(index)
        if entry is not None:
            return entry, entry.rows[index]
        subject = f"no cache has {index.kind} {index.value} of model {index.model_id} as its key"
        if index.kind == "prefix":
            raise failure(LLMStatusCode.LLM_PREFIX_NOT_EXIST, subject)
        raise not_there(f"{subject}: it was pulled or removed, or never was")

    def of_model(self, model_id: int) -> Entry:
        """Return the blocks cache of a model. Raises `LLM_KV_CACHE_NOT_EXIST`."""
        entry = self._by_model.get(model_id)
        if entry is None:
            raise not_there(f"no blocks cache has model {model_id} as its key")
        return entry

    def check_integrity(self) -> None:
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
