"""What the index of a tier does, in the simplest words: a list of records that is searched."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from kvelastic.tiers.base import NO_KEY

THERE_ALREADY, NO_ROOM = -1, -2


@dataclass
class Entry:
    """A key that is pending or ready."""

    slot: int
    ready: bool
    time: int
    level: int = 0
    parent: bytes = NO_KEY
    doomed: bool = False


@dataclass
class IndexModel:
    """`TierIndex` for a few records; each answer is looked for in all of them."""

    slots: int
    policy: str
    entries: dict[bytes, Entry] = field(default_factory=dict)
    holds: dict[int, list[tuple[bytes, int]]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    time: int = 0
    displaced: int = 0

    def held(self) -> set[int]:
        """Slots that holds hold."""
        return {slot for hold in self.holds.values() for _, slot in hold}

    def free(self) -> list[int]:
        taken = {entry.slot for entry in self.entries.values()} | self.held() | self.closed
        return [slot for slot in range(self.slots) if slot not in taken]

    def is_ready(self, key: bytes) -> bool:
        return key in self.entries and self.entries[key].ready

    def leading(self, keys: list[bytes]) -> list[bytes]:
        count = next((i for i, key in enumerate(keys) if not self.is_ready(key)), len(keys))
        return keys[:count]

    def use(self, keys: list[bytes]) -> list[bytes]:
        """The leading ready ones; the first of them is the youngest."""
        found = self.leading(keys)
        self.time += len(keys)
        for i, key in enumerate(found):
            entry = self.entries[key]
            if self.policy != "fifo":
                entry.time = self.time - i
            if self.policy == "lfu":
                entry.level += 1
            if self.policy == "slru":
                entry.level = 1
        return found

    def hold(self, ticket: int, keys: list[bytes]) -> list[int]:
        held = [(key, self.entries[key].slot) for key in self.use(keys)]
        self.holds[ticket] = held
        return [slot for _, slot in held]

    def release(self, ticket: int) -> list[tuple[bytes, int]]:
        ended = self.holds.pop(ticket)
        still = self.held() | {entry.slot for entry in self.entries.values()}
        freed: list[tuple[bytes, int]] = []
        for key, slot in ended:
            if slot not in still and slot not in {each for _, each in freed}:
                freed.append((key, slot))
        return freed

    def victim(self, spared: Set[bytes]) -> bytes | None:
        """Who goes next: leaves first, then the policy."""
        if self.policy == "slru":
            protected = sorted(
                (entry for entry in self.entries.values() if entry.ready and entry.level),
                key=lambda entry: entry.time,
            )
            for entry in protected[: max(0, len(protected) - (self.slots - self.slots // 5))]:
                self.time += 1
                entry.time, entry.level = self.time, 0
        parents = {entry.parent for entry in self.entries.values()}
        held = self.held()
        order = [
            (key in parents, entry.level, entry.time, key)
            for key, entry in self.entries.items()
            if entry.ready and entry.slot not in held and key not in spared
        ]
        return min(order)[-1] if order else None

    def claim(
        self, keys: list[bytes], chain_after: bytes | None
    ) -> tuple[list[int], list[tuple[bytes, int]]]:
        slots: list[int] = []
        displaced: list[tuple[bytes, int]] = []
        spared = {*keys, chain_after or NO_KEY}
        before = self.time
        self.time += len(keys)
        for i, key in enumerate(keys):
            if key in self.entries:
                slots.append(THERE_ALREADY)
            else:
                slot = self.take_slot(spared, displaced)
                slots.append(slot)
                if slot == NO_ROOM:
                    continue
                age = i + 1 if chain_after is None else len(keys) - i
                self.entries[key] = Entry(slot, ready=False, time=before + age)
            self.link(key, chain_after if i == 0 else keys[i - 1], chained=chain_after is not None)
        return slots, displaced

    def take_slot(self, spared: Set[bytes], displaced: list[tuple[bytes, int]]) -> int:
        if not self.free():
            gone = self.displace(1, spared)
            if not gone:
                return NO_ROOM
            displaced += gone
        return self.free()[0]

    def displace(self, count: int, spared: Set[bytes] = frozenset()) -> list[tuple[bytes, int]]:
        displaced: list[tuple[bytes, int]] = []
        while len(displaced) < count and (gone := self.victim(spared)) is not None:
            displaced.append((gone, self.entries.pop(gone).slot))
            self.displaced += 1
        return displaced

    def close(self, first: int, count: int) -> list[int]:
        closed = [slot for slot in self.free() if first <= slot < first + count]
        self.closed |= set(closed)
        return closed

    def close_by_policy(self, count: int) -> tuple[list[int], list[tuple[bytes, int]]]:
        slots: list[int] = []
        displaced: list[tuple[bytes, int]] = []
        while len(slots) < count and (slot := self.take_slot(set(), displaced)) != NO_ROOM:
            self.closed.add(slot)
            slots.append(slot)
        return slots, displaced

    def link(self, key: bytes, parent: bytes | None, *, chained: bool) -> None:
        entry = self.entries[key]
        if chained and parent and entry.parent == NO_KEY and parent != key:
            entry.parent = parent

    def commit(self, keys: list[bytes]) -> list[tuple[bytes, int]]:
        gone: list[tuple[bytes, int]] = []
        for key in keys:
            entry = self.entries[key]
            if entry.doomed or entry.slot >= self.slots:
                gone.append((key, self.entries.pop(key).slot))
            entry.ready = True
        return gone

    def abandon(self, keys: list[bytes]) -> None:
        for key in keys:
            del self.entries[key]

    def erase(self, keys: list[bytes]) -> list[tuple[bytes, int]]:
        freed: list[tuple[bytes, int]] = []
        for key in keys:
            entry = self.entries.get(key)
            if entry is None:
                continue
            if not entry.ready:
                entry.doomed = True
                continue
            del self.entries[key]
            if entry.slot not in self.held():
                freed.append((key, entry.slot))
        return freed

    def restore(self, key: bytes, slot: int, parent: bytes) -> bool:
        if (slot not in self.free() and slot not in self.closed) or key in self.entries:
            return False
        self.closed.discard(slot)
        self.time += 1
        self.entries[key] = Entry(slot, ready=True, time=self.time)
        self.link(key, parent, chained=True)
        return True

    def resize(self, slots: int) -> list[tuple[bytes, int]]:
        self.slots = slots
        self.closed = {slot for slot in self.closed if slot < slots}
        above = sorted(
            (entry.slot, key)
            for key, entry in self.entries.items()
            if entry.ready and entry.slot >= slots
        )
        self.displaced += len(above)
        for _, key in above:
            del self.entries[key]
        return [(key, slot) for slot, key in above if slot not in self.held()]

    def stats(self) -> dict[str, int]:
        ready = sum(entry.ready for entry in self.entries.values())
        return {
            "slots": self.slots,
            "ready": ready,
            "pending": len(self.entries) - ready,
            "closed": len(self.closed),
            "held": len(self.held()),
            "displaced": self.displaced,
        }
