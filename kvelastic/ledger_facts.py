"""What a device's ledger says, as plain values: who holds how much, and who waits for more."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Member:
    """One instance in a ledger, as it was found."""

    name: str
    """Of its segment."""
    uuid: bytes
    """Of its segment: 16 bytes."""
    pid: int
    status: str
    """alive, dead or unknown (it cannot be asked here whether it lives)."""
    granted_bytes: int
    """What it may hold now; it holds that much, or is about to."""
    min_bytes: int
    """Its guarantee: nobody takes it below that while it is awake."""
    limit_bytes: int
    priority: int
    in_use_bytes: int
    evictable_bytes: int
    """Whole pages of cached blocks: what others can have. Its record counts all cached blocks."""
    parked_bytes: int
    page_bytes: int
    idle_s: float
    """Since its last alloc or free."""
    ask_bytes: int
    """What it cannot get and waits for; 0: nothing."""
    ask_s: float
    """How long it has been asking; 0 where it does not."""
    wanted_bytes: int
    """What others have asked of it and it has not dealt with yet."""
    is_idle: bool | None = None
    """Whether its engine has reported that no request is unfinished; None: it reports nothing."""
    reserve_bytes: int = 0
    """What it holds on the device besides KV cache, while it is awake."""
    pledged_bytes: int = 0
    """What counts of that now, and nobody else gets: 0 while it sleeps; while it waits for memory
    to reserve, all that it is to have."""
    asleep: bool = False
    """Guarantee and reserve count for nothing until it wakes; then it asks for both."""

    @property
    def guaranteed_bytes(self) -> int:
        """What counts of the guarantee now."""
        return 0 if self.asleep else self.min_bytes


@dataclass(frozen=True)
class LedgerInfo:
    """One device's ledger."""

    device: str
    """`host`, or a GPU's UUID."""
    status: str
    """readable, foreign (another user's) or unreadable (see `problem`)."""
    problem: str = ""
    group: str = ""
    """Of instances that share it: `KVELASTIC_LEDGER`."""
    capacity_bytes: int = 0
    """What all instances together may hold."""
    others_bytes: int = 0
    """Of the device's memory, what processes that are not members use."""
    members: tuple[Member, ...] = field(default_factory=tuple)
    total_bytes: int = 0
    """All of the device's memory, where that is more than the capacity; reserves and strangers
    fill what lies outside the capacity first. 0: they come out of the capacity (a GPU)."""

    @property
    def instances(self) -> int:
        """How many share it."""
        return len(self.members)

    @property
    def granted_bytes(self) -> int:
        """Held by all members together."""
        return sum(member.granted_bytes for member in self.members)

    @property
    def guaranteed_bytes(self) -> int:
        """The sum of the guarantees of those who are awake."""
        return sum(member.guaranteed_bytes for member in self.members)

    @property
    def reserved_bytes(self) -> int:
        """What those who are awake have beside their KV caches, or wait for."""
        return sum(member.pledged_bytes for member in self.members)

    @property
    def outside_bytes(self) -> int:
        """Memory of the device that is outside the capacity."""
        return max(0, self.total_bytes - self.capacity_bytes)

    @property
    def taken_bytes(self) -> int:
        """What reserves and strangers take of the capacity: what fits nowhere outside it."""
        beside_bytes = self.reserved_bytes + self.others_bytes
        return min(self.capacity_bytes, max(0, beside_bytes - self.outside_bytes))

    @property
    def reserved_of_capacity_bytes(self) -> int:
        """What of that reserves take; the rest of it is `others_of_capacity_bytes`."""
        return min(self.reserved_bytes, self.taken_bytes)

    @property
    def others_of_capacity_bytes(self) -> int:
        """What of the capacity processes that are not members take."""
        return self.taken_bytes - self.reserved_of_capacity_bytes

    @property
    def asked_bytes(self) -> int:
        """What members wait for: the pressure on the device."""
        return sum(member.ask_bytes for member in self.members)

    @property
    def free_bytes(self) -> int:
        """What could be granted now."""
        return max(0, self.capacity_bytes - self.taken_bytes - self.granted_bytes)
