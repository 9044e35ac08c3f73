"""What a manager knows of peers: their caches by key, and how bytes come and go. The contract.

`links` fulfils it over `kvelastic.transfer`; managers know nothing else of other processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from kvelastic.datadist.cache_table import Entry
from kvelastic.datadist.descriptors import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
)
from kvelastic.datadist.pieces import Run

AnyKey: TypeAlias = CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey


@dataclass(frozen=True)
class RemoteCache:
    """A cache of a peer, as a key led to it."""

    cache_id: int
    desc: CacheDesc
    is_blocks: bool
    row: int
    """The row of the key; 0 for a blocks cache."""
    addrs: tuple[tuple[int, ...], ...]
    """Of each device, of each tensor, in the peer's process."""


class PeerCall(ABC):
    """One call of a manager's to one peer, with one deadline for all that it does.

    Raises `LLMException`: what the peer answers, `LLM_TIMEOUT` (the link is of no more use then),
    `LLM_LINK_FAILED` where the peer has gone.
    """

    @abstractmethod
    def find(self, key: AnyKey, *, is_write: bool = False) -> RemoteCache:
        """The cache that a key leads to."""

    @abstractmethod
    def pull(self, source: RemoteCache, target: Entry, pairs: Sequence[tuple[Run, Run]]) -> None:
        """Copy runs of a peer's cache into one of ours, on each device; all or an error."""

    @abstractmethod
    def push(self, source: Entry, target: RemoteCache, pairs: Sequence[tuple[Run, Run]]) -> None:
        """Copy runs of a cache of ours into a peer's, on each device; all or an error."""

    @abstractmethod
    def push_to_addresses(self, source: Entry, pieces: Sequence[tuple[Run, int]]) -> None:
        """Copy runs of a cache of ours to addresses of the peer's, which lie in its caches."""

    @abstractmethod
    def moved(self, cache: RemoteCache, tensors: range) -> None:
        """Tell the peer that these tensors of a row were copied (`CacheTable.moved`)."""


class Remote(ABC):
    """The peers of a cluster."""

    @property
    @abstractmethod
    def has_linked(self) -> bool:
        """Whether this cluster has begun to link: by default peers do not reach what it registers
        later. That a peer has linked it changes nothing, for that may be at any time."""

    @abstractmethod
    def call(
        self, cluster_id: int, *, is_layered: bool = False
    ) -> AbstractContextManager[PeerCall]:
        """A call to a peer. Raises `LLM_NOT_YET_LINK`, `LLM_WAIT_PROCESS_TIMEOUT` for a link that
        a timeout has broken, `LLM_LINK_BUSY` where a layered transfer and another call meet."""

    @abstractmethod
    def expose(self, entry: Entry) -> None:
        """Let peers reach a registered cache. Raises `LLMParamError` for memory that they reach."""

    @abstractmethod
    def withdraw(self, entry: Entry) -> None:
        """Let them not reach it any more."""
