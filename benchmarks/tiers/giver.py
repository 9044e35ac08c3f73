"""An instance with tiers that does as it is told: `benchmarks.ledger.instance`, and

fill BLOCKS     cache as many blocks under keys of their own
clean           have all of them copied                          -> how many could not be
tier            records in the tiers, and bytes written so far by this process
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ledger.instance import Verbs, alloc_until, serve

if TYPE_CHECKING:
    from kvelastic.config import Config
    from kvelastic.pool.pool import ElasticPool


def written_bytes() -> int:
    """What the kernel has been given to write to disks by this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


@contextmanager
def tier_verbs(pool: ElasticPool, settings: Config) -> Iterator[Verbs]:
    """The tiers that the settings name, and what can be asked of them."""
    from kvelastic.tiers.namespace import Namespace
    from kvelastic.tiers.opening import open_tiers

    blocks = pool.blocks
    tiers = open_tiers(pool, settings, Namespace("bench"))
    names = count(1)

    def fill(wanted: int) -> None:
        ids = alloc_until(blocks, wanted, 30.0)["ids"]
        assert ids is not None
        blocks.cache(ids, b"".join(next(names).to_bytes(16, "little") for _ in ids))

    def tier() -> dict[str, Any]:
        stores = tiers.stores if tiers is not None else ()
        return {
            "records": [store.capacity().records for store in stores],
            "written_bytes": written_bytes(),
        }

    try:
        yield {"fill": fill, "clean": lambda: blocks.clean(600.0), "tier": tier}
    finally:
        if tiers is not None:
            tiers.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), tier_verbs)
