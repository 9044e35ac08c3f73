"""The account of the simulated device: what guarantees and reserves leave for caches, and to whom.

The rules are the native ones (vmm_csrc/ledger/device_account.h), over simulated instances. Of
those who are awake, or about to wake, guarantee and reserve count; of a sleeper nothing does::

    asleep  --wake: do the sums allow it?-->  claiming  --is the reserve there?-->  awake
       ^  no: refused                             |  no, for five seconds: refused     |
       +------------------------------------------+------------------------------------+  sleep
"""

from __future__ import annotations

from collections.abc import Sequence

from kvelastic import _vmm
from tools.reclaim_simulator.instance import Instance


class Account:
    """The sums over the instances of one device, as they are when they are asked for."""

    def __init__(
        self, capacity_bytes: int, total_bytes: int, instances: Sequence[Instance]
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._total_bytes = total_bytes
        self._instances = instances

    @property
    def granted_bytes(self) -> int:
        """Held by all together."""
        return sum(one.granted_bytes for one in self._instances)

    @property
    def guaranteed_bytes(self) -> int:
        """What counts of the guarantees."""
        return sum(one.spec.min_bytes for one in self._instances if one.counts)

    @property
    def pledged_bytes(self) -> int:
        """What counts of the reserves: nobody is granted that any more."""
        return sum(one.spec.reserved_bytes for one in self._instances if one.counts)

    @property
    def left_bytes(self) -> int:
        """What all caches together may have."""
        return self._left_beside(self.pledged_bytes)

    @property
    def free_bytes(self) -> int:
        """What of that nobody has."""
        return max(0, self.left_bytes - self.granted_bytes)

    @property
    def excess_bytes(self) -> int:
        """What has to be given back before everything that was claimed is there."""
        return max(0, self.granted_bytes - self.left_bytes)

    def has_room_for(self, sleeper: Instance) -> bool:
        """Whether the sums allow that one to wake."""
        return _vmm.has_room_for(
            self._capacity_bytes,
            self._total_bytes,
            self.guaranteed_bytes + sleeper.spec.min_bytes,
            self.pledged_bytes + sleeper.spec.reserved_bytes,
        )

    def is_there(self, claimer: Instance) -> bool:
        """Whether caches leave room for what it claims; of two that claim the first one goes first.

        As LedgerMember::is_there of vmm_csrc/ledger/ledger_account.cpp.
        """
        before = self._instances[: claimer.index + 1]
        after = self._instances[claimer.index + 1 :]
        reserved_bytes = sum(one.spec.reserved_bytes for one in before if one.counts)
        reserved_bytes += sum(one.spec.reserved_bytes for one in after if not one.asleep)
        return self.granted_bytes <= self._left_beside(reserved_bytes)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if more is granted, guaranteed or reserved than there is."""
        size = (self._capacity_bytes, self._total_bytes)
        held_bytes = sum(one.spec.reserved_bytes for one in self._instances if not one.asleep)
        _vmm.check_account(*size, self.granted_bytes, 0, held_bytes)
        _vmm.check_account(*size, 0, self.guaranteed_bytes, self.pledged_bytes)

    def _left_beside(self, beside_bytes: int) -> int:
        return _vmm.left_for_caches(self._capacity_bytes, self._total_bytes, beside_bytes)
