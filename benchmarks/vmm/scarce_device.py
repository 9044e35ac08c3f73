"""The part of a GPU in which so much of pages fits beside all else that is held, and no more.

What others hold of a GPU counts in its ledger's capacity, and so do the instances' own contexts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.ledger.instance import Instance

if TYPE_CHECKING:
    from kvelastic import _vmm

PAGES = 2
"""Of the instance that is looked at."""


def utilization(
    driver: _vmm.CudaDriver,
    pages_bytes: int,
    page_mib: int,
    instances: int,
    environ: dict[str, str],
) -> str:
    """KVELASTIC_GPU_UTILIZATION for so many instances that share `pages_bytes`.

    Starts one instance and ends it again, to see what a process takes of the device.
    """
    free_bytes = driver.free_bytes
    with Instance(PAGES, page_mib, **environ) as one:
        one.read()
        # Pages that its maintenance thread maps ahead meanwhile are not part of the context.
        pages, looked = -1, 0
        while pages != looked:
            pages = one.ask("stats")["result"]["pages_mapped"]
            taken_bytes = free_bytes - driver.free_bytes
            looked = one.ask("stats")["result"]["pages_mapped"]
        context_bytes = taken_bytes - pages * (page_mib << 20)
    beside_bytes = driver.total_bytes - free_bytes + instances * max(context_bytes, 0)
    return str((pages_bytes + beside_bytes) / driver.total_bytes)
