"""Two native pools of one process that share a device.

shared = TwoPools("a-name-of-its-own")
a, b = shared.pools
shared.close()
"""

from __future__ import annotations

from native_pools import HUGE, LAYOUTS

from kvelastic import _vmm
from kvelastic.pool.pool import native_geometry
from kvelastic.shared import ledger, segment

PAGES = 6
PAGED = LAYOUTS["paged"]
BLOCKS_PER_PAGE = PAGED.blocks_per_page


class TwoPools:
    """Two pools with their segments on one ledger, which has room for the pages of one."""

    def __init__(self, name: str, reclaim_wait_s: float = 0.05) -> None:
        self.segments = [
            segment.create(f"{name}_{who}", engine="test", device="host") for who in "ab"
        ]
        self.ledgers = [
            ledger.join(
                "host",
                group=name,
                capacity_bytes=PAGES * HUGE,
                name=one.name,
                uuid=one.control_block.read_header()["uuid"],
                min_bytes=0,
                priority=0,
            )
            for one in self.segments
        ]
        self.pools = []
        self.ranges = []
        for joined in self.ledgers:
            memory = _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(PAGED, PAGES))
            self.ranges.append(memory)
            self.pools.append(
                _vmm.Pool(
                    memory,
                    max_blocks=PAGES * BLOCKS_PER_PAGE,
                    limit_bytes=PAGES * HUGE,
                    capacity_bytes=PAGES * HUGE,
                    preallocate=False,
                    device_set=_vmm.DeviceSet([(joined.member, [0])], HUGE),
                    reclaim_wait_s=reclaim_wait_s,
                )
            )

    def close(self) -> None:
        for joined in self.ledgers:
            joined.close()
        for one in self.segments:
            one.close()

    def check(self) -> None:
        for pool, joined in zip(self.pools, self.ledgers, strict=True):
            pool.check_integrity()
            assert joined.member.granted_bytes == pool.mapped_bytes
