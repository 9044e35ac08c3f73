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
    """Its guarantee: nobody takes it below that."""
    limit_bytes: int
    priority: int
    in_use_bytes: int
    cached_bytes: int
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
    """Of the device's memory, what processes that are not members use; it lowers what is free."""
    members: tuple[Member, ...] = field(default_factory=tuple)

    @property
    def granted_bytes(self) -> int:
        """Held by all members together."""
        return sum(member.granted_bytes for member in self.members)

    @property
    def guaranteed_bytes(self) -> int:
        """The sum of all guarantees."""
        return sum(member.min_bytes for member in self.members)

    @property
    def asked_bytes(self) -> int:
        """What members wait for: the pressure on the device."""
        return sum(member.ask_bytes for member in self.members)

    @property
    def free_bytes(self) -> int:
        """What could be granted now."""
        return max(0, self.capacity_bytes - self.others_bytes - self.granted_bytes)
