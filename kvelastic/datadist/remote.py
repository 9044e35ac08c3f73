"""What a manager knows of peers: their caches by key, and how bytes come and go. The contract.

`links.py` fulfils it over `kvelastic.transfer`; managers know nothing else of other processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvelastic.datadist.cache_table import Entry
from kvelastic.datadist.descriptors import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
)
from kvelastic.datadist.pieces import Run

AnyKey = CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey


@dataclass(frozen=True)
class RemoteCache:
    """A cache of a peer, as a key led to it."""

    cluster_id: int
    cache_id: int
    desc: CacheDesc
    is_blocks: bool
    row: int
    """The row of the key; 0 for a blocks cache."""
    addrs: tuple[tuple[int, ...], ...]
    """Of each device, of each tensor, in the peer's process."""


class Remote(ABC):
    """Calls raise `LLMException`: `LLM_NOT_YET_LINK` without a link, `LLM_LINK_BUSY` where another
    call of another kind uses it, `LLM_TIMEOUT` after the deadline of a call (the link is of no more
    use then), `LLM_LINK_FAILED` where the peer has gone."""

    @property
    @abstractmethod
    def has_linked(self) -> bool:
        """Whether there was a link already: what is registered later peers do not reach."""

    @abstractmethod
    def resolve(self, key: AnyKey) -> RemoteCache:
        """The cache that a key leads to. Raises what the peer answers, too."""

    @abstractmethod
    def pull(self, source: RemoteCache, target: Entry, pairs: Sequence[tuple[Run, Run]]) -> None:
        """Copy runs of a peer's cache into one of ours, on each device; all or an error."""

    @abstractmethod
    def push(self, source: Entry, target: RemoteCache, pairs: Sequence[tuple[Run, Run]]) -> None:
        """Copy runs of a cache of ours into a peer's, on each device; all or an error."""

    @abstractmethod
    def push_to_addresses(
        self, source: Entry, cluster_id: int, pieces: Sequence[tuple[Run, int]]
    ) -> None:
        """Copy runs of a cache of ours to addresses of a peer's, which lie in its caches."""

    @abstractmethod
    def moved(self, cache: RemoteCache, tensors: Sequence[int]) -> None:
        """Tell the peer that these tensors of a row were had: its key goes with the last."""
