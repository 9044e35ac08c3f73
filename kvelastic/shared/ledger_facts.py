"""The content of a device's ledger as plain values: holders and pending memory requests."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Member:
    """One instance in a ledger, as of one read."""

    name: str
    """Name of its segment."""
    uuid: bytes
    """UUID of its segment: 16 bytes."""
    pid: int
    status: str
    """alive, dead or unknown (liveness cannot be checked here)."""
    granted_bytes: int
    """Memory that it may hold now; it holds that much, or is about to."""
    min_bytes: int
    """Guarantee: while it is awake, other instances do not reclaim below this."""
    limit_bytes: int
    priority: int
    in_use_bytes: int
    evictable_bytes: int
    """Whole pages of cached blocks, which can be reclaimed. Its segment counts all cached blocks.
"""
    parked_bytes: int
    page_bytes: int
    idle_s: float
    """Seconds since its last alloc or free."""
    ask_bytes: int
    """Memory that it waits for; 0 if none."""
    ask_s: float
    """Seconds that it has waited for memory; 0 if it does not wait."""
    wanted_bytes: int
    """Pending reclaim requests of other instances to this one."""
    is_idle: bool | None = None
    """Whether its engine reported that no request is unfinished; None if it reports nothing."""
    reserve_bytes: int = 0
    """Memory on the device besides KV cache, while the instance is awake."""
    pledged_bytes: int = 0
    """The part of the reserve that counts now and that other instances cannot get. 0 while it
    sleeps; the whole new reserve while it waits for memory to reserve."""
    asleep: bool = False
    """If True, guarantee and reserve do not count. To wake, the instance requests both."""

    @property
    def guaranteed_bytes(self) -> int:
        """The part of the guarantee that counts now."""
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
    """Name of the group of instances that share the ledger: `KVELASTIC_LEDGER`."""
    capacity_bytes: int = 0
    """Memory that the instances together may hold."""
    others_bytes: int = 0
    """Device memory used by processes that are not members."""
    members: tuple[Member, ...] = field(default_factory=tuple)
    total_bytes: int = 0
    """Total device memory, if more than the capacity. Reserves and non-members use the memory
    outside the capacity first. 0: they use the capacity (a GPU)."""

    @property
    def instances(self) -> int:
        """Number of instances that share the ledger."""
        return len(self.members)

    @property
    def granted_bytes(self) -> int:
        """Memory granted to the members together."""
        return sum(member.granted_bytes for member in self.members)

    @property
    def guaranteed_bytes(self) -> int:
        """Sum of the guarantees of awake members."""
        return sum(member.guaranteed_bytes for member in self.members)

    @property
    def reserved_bytes(self) -> int:
        """Memory that members hold besides KV cache, or wait to reserve."""
        return sum(member.pledged_bytes for member in self.members)

    @property
    def outside_bytes(self) -> int:
        """Device memory outside the capacity."""
        return max(0, self.total_bytes - self.capacity_bytes)

    @property
    def taken_bytes(self) -> int:
        """The part of the capacity used by reserves and non-members.

        They first fill `outside_bytes`.
        """
        beside_bytes = self.reserved_bytes + self.others_bytes
        return min(self.capacity_bytes, max(0, beside_bytes - self.outside_bytes))

    @property
    def reserved_of_capacity_bytes(self) -> int:
        """The part of `taken_bytes` used by reserves; the rest is `others_of_capacity_bytes`."""
        return min(self.reserved_bytes, self.taken_bytes)

    @property
    def others_of_capacity_bytes(self) -> int:
        """The part of the capacity used by processes that are not members."""
        return self.taken_bytes - self.reserved_of_capacity_bytes

    @property
    def asked_bytes(self) -> int:
        """Memory that members wait for: the memory pressure on the device."""
        return sum(member.ask_bytes for member in self.members)

    @property
    def free_bytes(self) -> int:
        """Memory that could be granted now."""
        return max(0, self.capacity_bytes - self.taken_bytes - self.granted_bytes)
