"""An instance with tiers that does as it is told: `benchmarks.ledger.instance`, and

fill BLOCKS     cache as many blocks under keys of their own
clean           have all of them copied                          -> how many could not be
tier            records in the tiers, and bytes written so far by this process
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.ledger.instance import BLOCKS_PER_PAGE, alloc_until, cpu_ms


def written_bytes() -> int:
    """What the kernel has been given to write to disks by this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


def serve(pages: int, page_mib: int) -> None:
    """Until stdin is closed."""
    from kvelastic.config import load
    from kvelastic.device import resolve
    from kvelastic.layout import PageLayout
    from kvelastic.pool import local_range, open_pool
    from kvelastic.tiers.namespace import Namespace
    from kvelastic.tiers.opening import open_tiers

    settings = load()
    page_bytes = page_mib << 20
    layout = PageLayout(page_bytes // BLOCKS_PER_PAGE, 1, BLOCKS_PER_PAGE, page_bytes)
    device = resolve(settings.device, settings)
    names = count(1)
    with open_pool(
        settings,
        layout,
        pages,
        num_blocks=pages * BLOCKS_PER_PAGE,
        block_tokens=16,
        engine="bench",
        devices=[device],
        memory=local_range(device),
    ) as pool:
        blocks = pool.blocks
        tiers = open_tiers(pool, settings, Namespace("bench"))
        pool.start_keeper()

        def fill(wanted: int) -> None:
            ids = alloc_until(blocks, wanted, 30.0)["ids"]
            assert ids is not None
            blocks.cache(ids, b"".join(next(names).to_bytes(16, "little") for _ in ids))

        def tier() -> dict[str, Any]:
            figures = tiers.statistics() if tiers is not None else None
            return {
                "records": [one.capacity.records for one in figures.tiers if one.capacity]
                if figures
                else [],
                "written_bytes": written_bytes(),
            }

        verbs: dict[str, Any] = {
            "nothing": lambda: None,
            "fill": fill,
            "clean": lambda: blocks.clean(600.0),
            "tier": tier,
        }
        print(json.dumps({"name": pool.name}), flush=True)
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            start, before = time.perf_counter(), cpu_ms()
            result = verbs.get(verb, getattr(blocks, verb, None))(*arguments)
            took = (time.perf_counter() - start) * 1000
            answer = {"result": result, "ms": took, "cpu_ms": cpu_ms() - before}
            print(json.dumps(answer | {"cpu_total_ms": cpu_ms()}), flush=True)
        if tiers is not None:
            tiers.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
