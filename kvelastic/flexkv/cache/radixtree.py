"""Prefixes of token sequences in one tier.

    match = tree.match_prefix(sequence)            # match.num_ready_matched_blocks
    place = tree.insert(sequence, first=match.num_ready_matched_blocks)
    with tree.lock(sequence, match.num_ready_matched_blocks): ...

The name is FlexKV's. The tier's index is flat: a key identifies all tokens up to the end of its
block, so a prefix is a run of keys.
"""

from __future__ import annotations

from typing import NamedTuple

from kvelastic.errors import InvalidArgumentError
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

    def match_prefix(self, sequence: SequenceMeta, first: int = 0) -> MatchResult:
        """Return the longest prefix from block `first` on."""
        return MatchResult(*self.store.leading(_keys(sequence, first)))

    def insert(self, sequence: SequenceMeta, first: int = 0) -> Reservation | None:
        """Reserve space for the missing blocks from `first` on.

        They are ready when their records are put. Returns None if not all of them fit.
        """
        after = sequence.parent(first) if first else NO_KEY
        return self.store.reserve(_keys(sequence, first), chain_after=after)

    def lock(self, sequence: SequenceMeta, count: int, first: int = 0) -> Hold:
        """Hold the leading ready ones of `count` blocks from `first` on."""
        return self.store.hold(_keys(sequence, first)[: count * KEY_BYTES])

    def evict(self, count: int) -> int:
        """Evict up to `count` blocks, the ends of sequences first; return how many."""
        return self.store.evict(count)

    def remove(self, sequence: SequenceMeta, first: int = 0) -> int:
        """Erase the blocks from `first` on; return how many were present."""
        return self.store.erase(_keys(sequence, first))

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


def _keys(sequence: SequenceMeta, first: int) -> bytes:
    if not 0 <= first <= sequence.num_blocks:
        raise InvalidArgumentError(f"block {first} is not one of {sequence.num_blocks}")
    return sequence.keys[first * KEY_BYTES :] if first else sequence.keys
