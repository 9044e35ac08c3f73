"""Evicts records by an index's policy, without a new record to insert."""

from __future__ import annotations

import itertools

from kvelastic import _vmm
from kvelastic.tiers.base import KEY_BYTES

_numbers = itertools.count(1)


def unlikely_keys(count: int) -> list[bytes]:
    """Return keys that no record has. A collision is as unlikely as between two hashes."""
    return [
        b"ballast" + next(_numbers).to_bytes(KEY_BYTES - len(b"ballast"), "big")
        for _ in range(count)
    ]


def displace(index: _vmm.TierIndex, count: int) -> list[tuple[bytes, int]]:
    """Evict up to `count` records that are neither leased nor pending.

    Returns their keys and slots. The caller must prevent concurrent claims.
    """
    have = index.stats()
    displaced: list[tuple[bytes, int]] = []
    held: list[bytes] = []
    # A claim takes free slots first. Some slots that look free belong to leases of erased records.
    wanted = have["slots"] - have["ready"] - have["pending"] - have["closed"]
    while wanted > 0 or len(displaced) < count:
        names = unlikely_keys(max(wanted, count - len(displaced)))
        slots, gone = index.claim(b"".join(names), None)
        displaced += gone
        taken = [name for name, slot in zip(names, slots, strict=True) if slot >= 0]
        held += taken
        if len(taken) < len(names):
            break
        wanted = 0
    index.abandon(b"".join(held))
    return displaced
