"""What tiers' copies move a second, to pinned memory of the host and back; what a move costs.

Records of all layers, as tiers copy them: one strided copy for each extent of a block.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.gpu.findings import Findings
from benchmarks.vmm.section import Section
from kvelastic import _vmm

PAGE_BYTES = 32 << 20
BLOCKS_PER_PAGE = 16
LAYERS = 32
"""Of each K and V: a block of 2 MiB is 64 rows."""


def main() -> None:
    with Findings.of_command(__doc__) as found:
        pages, rounds = (2, 2) if found.quick else (16, 7)
        driver = _vmm.CudaDriver("cuda")
        driver.use_streams([])
        rows: list[tuple[str, ...]] = []
        for name, geometry in _geometries(pages).items():
            rows += _measure(found, name, driver, geometry, rounds)
        header = ("layout", "way", "GB/s, median", "us a block")
        found.table(Section("Copies of blocks", header, rows))


def _geometries(pages: int) -> dict[str, _vmm.Geometry]:
    paged = _vmm.Geometry(
        pages=pages, extent_bytes=PAGE_BYTES, block_bytes=PAGE_BYTES // BLOCKS_PER_PAGE,
        blocks_per_page=BLOCKS_PER_PAGE,
    )  # fmt: skip
    buffers = 2 * LAYERS
    rows = _vmm.Geometry(
        pages=pages, extent_bytes=PAGE_BYTES,
        block_bytes=PAGE_BYTES // BLOCKS_PER_PAGE // buffers,
        blocks_per_page=BLOCKS_PER_PAGE, buffers_per_extent=buffers,
    )  # fmt: skip
    return {"one piece": paged, f"{buffers} rows": rows}


def _measure(
    found: Findings, name: str, driver: _vmm.CudaDriver, geometry: _vmm.Geometry, rounds: int
) -> list[tuple[str, ...]]:
    memory = _vmm.Range.reserve(driver, geometry)
    blocks = geometry.pages * BLOCKS_PER_PAGE
    pool = _vmm.Pool(
        memory,
        max_blocks=blocks,
        limit_bytes=geometry.range_bytes,
        capacity_bytes=geometry.range_bytes,
        preallocate=False,
    )
    ids = pool.alloc(blocks - 1)
    assert ids is not None
    half = len(ids) // 2
    staging = _vmm.Staging(len(ids), pool.record_bytes)
    slots = list(range(len(ids)))
    for slot in slots:
        staging.view(slot)[:8] = slot.to_bytes(8, "little")
    ways: dict[str, tuple[int, Callable[[], None]]] = {
        "to the device": (len(ids), lambda: pool.copy_in(staging, slots, ids)),
        "to the host": (len(ids), lambda: pool.copy_out(ids, staging, slots)),
        "within it": (half, lambda: memory.copy(ids[:half], ids[half : 2 * half])),
    }
    told: list[tuple[str, ...]] = []
    for way, (count, copy) in ways.items():
        copy()  # the first one pins the staging
        took_s = statistics.median(_timed(copy) for _ in range(rounds))
        rate = count * pool.record_bytes / took_s / 1e9
        found.figure(f"{name}, {way}, GB/s", rate)
        told.append((name, way, f"{rate:.1f}", f"{took_s / count * 1e6:.1f}"))
    pool.copy_out(ids, staging, slots)
    copied = [int.from_bytes(staging.view(slot)[:8], "little") for slot in slots]
    moved = slots[:half] + slots[:half] + slots[2 * half :]
    found.check(f"each block has its bytes ({name})", copied == moved)
    pool.close(discard=True)
    return told


def _timed(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
