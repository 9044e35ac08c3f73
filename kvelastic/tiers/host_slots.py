"""Which record of the host tier lies in which block of its pool, whose it is, and how old.

A *slot* is a number that the index gives a record; a *block* is where its bytes lie. Blocks move
and go as the pool needs, slots do not. Flat arrays by slot: a record costs no Python object. Not
thread-safe: its owner holds a lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvelastic.errors import IntegrityError
from kvelastic.tiers.base import KEY_BYTES, Selection
from kvelastic.tiers.namespace import Namespace

GONE = -1
"""The block of a slot that holds nothing."""


class HostSlots:
    """The records that lie in blocks, by slot and by block."""

    def __init__(self) -> None:
        self._blocks = array("q")
        self._worlds = array("I")
        self._put_at_s = array("d")
        self._keys = bytearray()
        self._slot_of: dict[int, int] = {}
        self._namespaces: list[Namespace] = []
        self._world_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def world_of(self, namespace: Namespace) -> int:
        """A small number for a namespace, the same each time."""
        world = self._world_of.setdefault(namespace.fingerprint, len(self._namespaces))
        if world == len(self._namespaces):
            self._namespaces.append(namespace)
        return world

    def fill(self, slot: int, block: int, key: bytes, world: int, now_s: float) -> None:
        """A record of `world` lies in `block` from now on."""
        missing = slot + 1 - len(self._blocks)
        if missing > 0:
            missing += len(self._blocks) // 2  # slots come one after the other
            self._blocks.extend([GONE] * missing)
            self._worlds.extend([0] * missing)
            self._put_at_s.extend([0.0] * missing)
            self._keys.extend(bytes(missing * KEY_BYTES))
        self._blocks[slot] = block
        self._worlds[slot] = world
        self._put_at_s[slot] = now_s
        self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key
        self._slot_of[block] = slot

    def empty(self, slot: int) -> int:
        """Forget what lies there; answers its block, or GONE."""
        block = self.block_of(slot)
        if block != GONE:
            self._blocks[slot] = GONE
            del self._slot_of[block]
        return block

    def move(self, old: int, new: int) -> None:
        """What lay in block `old` lies in `new`. `new` holds nothing else that is known here."""
        slot = self._slot_of.pop(old, None)
        if slot is not None:
            self._blocks[slot] = new
            self._slot_of[new] = slot

    def block_of(self, slot: int) -> int:
        """Where the record of a slot lies, or GONE."""
        return self._blocks[slot] if 0 <= slot < len(self._blocks) else GONE

    def slot_of(self, block: int) -> int | None:
        """Whose record lies in a block; None: none that is known here."""
        return self._slot_of.get(block)

    def key_of(self, slot: int) -> bytes:
        """The key of the record of a slot that holds one."""
        return bytes(self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def slots(self) -> Iterator[int]:
        """All slots that hold a record."""
        return iter(list(self._slot_of.values()))

    def keys_matching(self, selection: Selection, now_s: float) -> bytes:
        """The keys of all records that `selection` names."""
        worlds = {
            world for world, namespace in enumerate(self._namespaces) if selection.names(namespace)
        }
        age_s = selection.older_than_s
        return b"".join(
            self.key_of(slot)
            for slot in self._slot_of.values()
            if self._worlds[slot] in worlds
            and (age_s is None or now_s - self._put_at_s[slot] >= age_s)
        )

    def check_integrity(self) -> None:
        """Compare both directions; raises `IntegrityError` naming what disagrees."""
        for block, slot in self._slot_of.items():
            if self.block_of(slot) != block:
                raise IntegrityError(
                    f"block {block} is said to hold slot {slot}, which says {self.block_of(slot)}"
                )
        filled = sum(block != GONE for block in self._blocks)
        if filled != len(self._slot_of):
            raise IntegrityError(f"{filled} slots have blocks, {len(self._slot_of)} blocks slots")
