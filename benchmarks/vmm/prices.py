"""What the simulator charges, and a sequence of calls at these prices: arithmetic, no clock.

The simulator's own work is within a delay as long as it is the shorter of the two. Where it is not
(releasing 64 granules, a map of 1.5 us) a measured figure is the simulation's own cost, so every
simulated comparison is printed at the bare prices too. The figures are those of
`tests/sim/delays.cpp`; a test compares the two.
"""

from __future__ import annotations

from typing import Final, NamedTuple

GRANULE_BYTES: Final = 2 << 20


class Price(NamedTuple):
    """Microseconds for each handle that a call touches, and for each 2 MiB of them."""

    handle_us: float
    granule_us: float = 0.0

    def of(self, handle_bytes: int) -> float:
        return self.handle_us + self.granule_us * (handle_bytes // GRANULE_BYTES)


class Profile(NamedTuple):
    """The prices of one GPU's calls."""

    create: Price
    map: Price
    set_access: Price
    unmap: Price
    release: Price

    def own_us(self, handle_bytes: int, *, given_back: bool) -> float:
        """One handle of kvelastic's, grown and shrunk."""
        calls = [self.map, self.set_access, self.unmap]
        if given_back:
            calls += [self.create, self.release]
        return sum(call.of(handle_bytes) for call in calls)

    def kvcached_us(self, handle_bytes: int) -> float:
        """One handle of kvcached's, grown and shrunk; the zero page is mapped and unmapped too."""
        twice = 2 * sum(c.of(handle_bytes) for c in (self.unmap, self.map, self.set_access))
        return twice + self.create.of(handle_bytes) + self.release.of(handle_bytes)


PROFILES: Final = {
    "a100": Profile(Price(193), Price(1.45), Price(36), Price(25.6), Price(24)),
    "h100": Profile(Price(29.2), Price(1.9), Price(50), Price(30), Price(24)),
    "gb10": Profile(Price(66), Price(0.7), Price(22, 12), Price(48), Price(32)),
}
