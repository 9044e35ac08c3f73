"""Prefixes of token sequences in one tier: what is there, on its way, and held.

    match = tree.match_prefix(sequence)            # match.num_ready_matched_blocks
    place = tree.insert(sequence, first=match.num_ready_matched_blocks)
    with tree.lock(sequence, match.num_ready_matched_blocks): ...

The name is FlexKV's. Below it is the tier's flat index: each key stands for all tokens before it,
so a prefix is a run of keys, and there are no nodes to split.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.block import SequenceMeta
from kvelastic.tiers.base import KEY_BYTES, NO_KEY, Lease, Reservation, Selection, Store
from kvelastic.tiers.namespace import Namespace


@dataclass(frozen=True)
class MatchResult:
    """How many leading blocks are there."""

    num_ready_matched_blocks: int
    """Whose records are whole."""
    num_matched_blocks: int
    """Those that are there or on their way: not to be put once more."""


class RadixTree:
    """The blocks of one store by their tokens. Any thread."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self._namespace = namespace

    def match_prefix(self, sequence: SequenceMeta, first: int = 0) -> MatchResult:
        """The longest prefix from block `first` on. Changes nothing."""
        return MatchResult(*self._store.leading(_keys(sequence, first)))

    def insert(self, sequence: SequenceMeta, first: int = 0) -> Reservation | None:
        """Places for the blocks from `first` on that are not there: on their way from now on.

        They are ready when their records are put. None where not all have a place; what is there
        may have displaced others by then.
        """
        after = sequence.parent(first) if first else NO_KEY
        return self._store.reserve(_keys(sequence, first), chain_after=after)

    def lock(self, sequence: SequenceMeta, count: int, first: int = 0) -> Lease:
        """Hold `count` blocks from `first` on; the leading ones that are ready are held."""
        return self._store.lease(_keys(sequence, first)[: count * KEY_BYTES])

    def evict(self, count: int) -> int:
        """Displace `count` blocks, the ends of sequences first; answers how many went."""
        return self._store.evict(count)

    def remove(self, sequence: SequenceMeta, first: int = 0) -> int:
        """Forget the blocks from `first` on; answers how many were there."""
        return self._store.erase(_keys(sequence, first))

    def reset(self) -> int:
        """Forget all blocks of this world; answers how many. Blocks."""
        return self._store.erase_matching(Selection(namespace=self._namespace))

    @property
    def total_cached_blocks(self) -> int:
        """How many the store has, of all worlds."""
        return self._store.capacity().records

    def is_empty(self) -> bool:
        """Whether it has none."""
        return self.total_cached_blocks == 0


def _keys(sequence: SequenceMeta, first: int) -> bytes:
    if not 0 <= first <= sequence.num_blocks:
        raise InvalidArgumentError(f"block {first} is not one of {sequence.num_blocks}")
    return sequence.keys[first * KEY_BYTES :] if first else sequence.keys
