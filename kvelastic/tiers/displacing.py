"""Taking room from records by an index's policy, without a record that needs it."""

from __future__ import annotations

import itertools

from kvelastic import _vmm
from kvelastic.tiers.base import KEY_BYTES

_numbers = itertools.count(1)


def unlikely_keys(count: int) -> list[bytes]:
    """Keys that no record has: a hash is met by one of them as often as by another hash."""
    return [
        b"ballast" + next(_numbers).to_bytes(KEY_BYTES - len(b"ballast"), "big")
        for _ in range(count)
    ]


def displace(index: _vmm.TierIndex, count: int) -> list[tuple[bytes, int]]:
    """Displace `count` records, leased and pending ones excepted; answers their keys and slots.

    The caller sees to it that nobody claims meanwhile.
    """
    have = index.stats()
    displaced: list[tuple[bytes, int]] = []
    held: list[bytes] = []
    # Free slots are taken first. Some that look free belong to leases of erased records.
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
