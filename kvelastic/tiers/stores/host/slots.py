"""Records of the host tier: the block, the owner and the age of each.

A *slot* is the number that the index gives a record. A *block* is where the pool keeps its bytes.
The pool moves and evicts blocks; slots do not change. The data is in flat arrays by slot, so a
record costs no Python object. Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvelastic.errors import IntegrityError
from kvelastic.tiers.base import KEY_BYTES
from kvelastic.tiers.stores.record_owner import Owner, Wanted

GONE = -1
"""The block of an empty slot."""


class HostSlots:
    """Records in blocks, by slot and by block."""

    def __init__(self) -> None:
        self._blocks = array("q")
        self._owner_ids = array("I")
        self._put_at_ns = array("q")
        self._keys = bytearray()
        self._slot_of: dict[int, int] = {}
        self._owners: list[Owner] = []
        self._owner_id_of: dict[Owner, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def owner_id_of(self, owner: Owner) -> int:
        """Return the id of an owner: a small number, the same for each call."""
        owner_id = self._owner_id_of.setdefault(owner, len(self._owners))
        if owner_id == len(self._owners):
            self._owners.append(owner)
        return owner_id

    def fill(self, slot: int, block: int, key: bytes, owner_id: int, now_ns: int) -> None:
        """Record that `block` holds a record of the owner `owner_id`."""
        missing = slot + 1 - len(self._blocks)
        if missing > 0:
            missing += len(self._blocks) // 2  # slots come in ascending order
            self._blocks.extend([GONE] * missing)
            self._owner_ids.extend([0] * missing)
            self._put_at_ns.extend([0] * missing)
            self._keys.extend(bytes(missing * KEY_BYTES))
        self._blocks[slot] = block
        self._owner_ids[slot] = owner_id
        self._put_at_ns[slot] = now_ns
        self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key
        self._slot_of[block] = slot

    def empty(self, slot: int) -> int:
        """Remove the slot's record; return its block, or GONE."""
        block = self.block_of(slot)
        if block != GONE:
            self._blocks[slot] = GONE
            del self._slot_of[block]
        return block

    def move(self, old: int, new: int) -> None:
        """Record that the pool moved block `old` to `new`. `new` must not be known here."""
        slot = self._slot_of.pop(old, None)
        if slot is not None:
            self._blocks[slot] = new
            self._slot_of[new] = slot

    def block_of(self, slot: int) -> int:
        """Return the block of a slot's record, or GONE."""
        return self._blocks[slot] if 0 <= slot < len(self._blocks) else GONE

    def slot_of(self, block: int) -> int | None:
        """Return the slot of the record in a block; None if unknown."""
        return self._slot_of.get(block)

    def key_of(self, slot: int) -> bytes:
        """Return the key of the record in a slot that has one."""
        return bytes(self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def slots(self) -> Iterator[int]:
        """Return an iterator over the slots that have a record. Later changes do not affect it."""
        return iter(list(self._slot_of.values()))

    def keys_matching(self, wanted: Wanted) -> bytes:
        """Return the keys of the selected records, concatenated."""
        return b"".join(
            self.key_of(slot)
            for slot in self._slot_of.values()
            if wanted(self._owners[self._owner_ids[slot]], self._put_at_ns[slot])
        )

    def check_integrity(self) -> None:
        """Compare both mappings; raises `IntegrityError` that names the disagreement."""
        for block, slot in self._slot_of.items():
            if self.block_of(slot) != block:
                raise IntegrityError(
                    f"block {block} is said to hold slot {slot}, which says {self.block_of(slot)}"
                )
        filled = sum(block != GONE for block in self._blocks)
        if filled != len(self._slot_of):
            raise IntegrityError(f"{filled} slots have blocks, {len(self._slot_of)} blocks slots")
