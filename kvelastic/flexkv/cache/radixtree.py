"""Prefixes of token sequences in one tier.

    match = tree.match_prefix(sequence)            # match.num_ready_matched_blocks
    place = tree.insert(sequence)
    with tree.lock(sequence, match.num_ready_matched_blocks): ...

The name is FlexKV's. The tier's index is flat: a key identifies all tokens up to the end of its
block, so a prefix is a run of keys.
"""

from __future__ import annotations

from typing import NamedTuple

from kvelastic.flexkv.common.block import SequenceMeta
from kvelastic.tiers.base import KEY_BYTES, NO_KEY, Hold, Reservation, Selection, Store
from kvelastic.tiers.namespace import Namespace


class MatchResult(NamedTuple):
    """The leading blocks of a sequence that a tier has."""

    num_ready_matched_blocks: int
    """Blocks with complete records."""
    num_matched_blocks: int
    """Blocks that are present or in progress."""


class RadixTree:
    """The blocks of one store by their tokens. Any thread may call."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self.store = store
        self._namespace = namespace

    def match_prefix(self, sequence: SequenceMeta) -> MatchResult:
        """Return the longest prefix."""
        return MatchResult(*self.store.leading(sequence.keys))

    def insert(self, sequence: SequenceMeta) -> Reservation | None:
        """Reserve space for the missing blocks.

        They are ready when their records are put. Returns None if not all of them fit.
        """
        return self.store.reserve(sequence.keys, chain_after=NO_KEY)

    def lock(self, sequence: SequenceMeta, count: int) -> Hold:
        """Hold the leading ready ones of the first `count` blocks."""
        return self.store.hold(sequence.keys[: count * KEY_BYTES])

    def evict(self, count: int) -> int:
        """Evict up to `count` blocks, the ends of sequences first; return how many."""
        return self.store.evict(count)

    def remove(self, sequence: SequenceMeta) -> int:
        """Erase the blocks; return how many were present."""
        return self.store.erase(sequence.keys)

    def reset(self) -> int:
        """Erase all blocks of this namespace; return how many. Blocks."""
        return self.store.erase_matching(Selection(namespace=self._namespace))

    @property
    def total_cached_blocks(self) -> int:
        """Number of records in the store, in all namespaces."""
        return self.store.capacity().records

    def is_empty(self) -> bool:
        """Whether the store has no record."""
        return self.total_cached_blocks == 0
