"""Part 2: what a page costs that is needed and then not: cold, recycled, parked; the bare calls.

cold      create, map, set_access, unmap, destroy: its memory came from the device and went back
recycled  map, set_access, unmap: its memory stayed with kvelastic in between
parked    alloc and free of its blocks; the page stays mapped
guarded   as recycled, with KVELASTIC_GUARD_PAGES
bare      map, set_access, unmap of a page that exists, with nothing of kvelastic's around them

The page is the default one of a model of 36 layers (Qwen3-4B, 18 MiB).
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

from benchmarks.vmm import driver_kinds, own_pages
from benchmarks.vmm.bare_cuda import BareCuda
from benchmarks.vmm.models import MIB, QWEN3_4B
from benchmarks.vmm.section import Section, median_p99, median_ratio

TITLE = "One page, needed and given up"
WAYS = ("bare", "recycled", "cold", "parked", "guarded")
FULL: dict[str, Any] = {"rounds": 300}
QUICK: dict[str, Any] = {"rounds": 5}


def measure(kind: str, *, rounds: int) -> dict[str, Any]:
    """`us[way]`: microseconds of a whole cycle, a sample a round, all ways taking turns."""
    layout = QWEN3_4B.paged()
    cycles = cycles_of(kind)
    us: dict[str, list[float]] = {way: [] for way in WAYS}
    gc.disable()
    for turn in range(rounds + 3):
        # Whoever comes after another finds the machine as that one has left it.
        shift = turn % len(WAYS)
        for way in WAYS[shift:] + WAYS[:shift]:
            start = time.perf_counter_ns()
            cycles[way]()
            if turn >= 3:
                us[way].append((time.perf_counter_ns() - start) / 1000)
    told = {"us": us, "page_bytes": layout.page_bytes, "layers": QWEN3_4B.layers}
    return told if kind == driver_kinds.HOST else told | {"ctypes_us": BareCuda().ctypes_us()}


def cycles_of(kind: str) -> dict[str, Callable[[], None]]:
    """A function for each way that goes once through its cycle."""
    from kvelastic import _vmm

    layout = QWEN3_4B.paged()
    page_bytes = layout.page_bytes
    touched = range(0, page_bytes if kind == driver_kinds.HOST else 0, 2 * MIB)

    def use(address: int) -> None:
        # On the host an untouched page has no page tables, and unmapping nothing is cheap.
        for offset in touched:
            ctypes.memset(address + offset, 1, 64)

    lowest: Any = driver_kinds.open_bare(kind)
    bare_address, bare_handle = lowest.reserve(page_bytes), lowest.create(page_bytes)

    def bare() -> None:
        lowest.map(bare_address, page_bytes, bare_handle)
        lowest.set_access(bare_address, page_bytes)
        use(bare_address)
        lowest.unmap(bare_address, page_bytes)

    seam = driver_kinds.open_seam(kind)
    keeps = own_pages.reserve(seam, layout, 1)
    gives_back = own_pages.reserve(seam, layout, 1)
    guards = own_pages.reserve(_vmm.GuardDriver(seam, page_bytes), layout, 1)
    pool = own_pages.pool_over(own_pages.reserve(seam, layout, 2))
    one_page = layout.blocks_per_page
    pool.free(pool.alloc(2 * one_page - 1) or [])  # both pages mapped; block 0 is the null block

    def recycled() -> None:
        keeps.map([0])
        use(keeps.address)
        keeps.unmap([0])

    def guarded() -> None:
        guards.map([0])
        use(guards.address)
        guards.unmap([0])

    def cold() -> None:
        gives_back.map([0])
        use(gives_back.address)
        gives_back.unmap([0], destroy=True)

    def parked() -> None:
        ids = pool.alloc(one_page)
        assert ids is not None
        pool.free(ids)

    return {
        "bare": bare, "recycled": recycled, "cold": cold, "parked": parked, "guarded": guarded
    }  # fmt: skip


def sections(data: dict[str, Any], kind: driver_kinds.DriverKind) -> list[Section]:
    us = data["us"]
    bars = {"recycled": "<= 1.2 on a GPU", "parked": "no driver call"}
    rows = [
        (
            way,
            median_p99(us[way]),
            f"{median_ratio(us[way], us['bare']):.2f}",
            bars.get(way, ""),
        )
        for way in WAYS
    ]
    lowest = "on the seam, which is the lowest there is here"
    if "ctypes_us" in data:
        lowest = f"through ctypes, which is about {3 * data['ctypes_us']:.1f} us of it"
    notes = [f"A cycle by kvelastic's own Range and Pool; bare: the same three calls {lowest}."]
    if kind.name == driver_kinds.HOST:
        notes.append("Each 2 MiB is touched once in a cycle, bare too.")
    if kind.name == driver_kinds.SIMULATED:
        notes.append("Profile a100; its delays are for each handle, whatever its size.")
    title = f"{TITLE} ({data['page_bytes'] // MIB} MiB, {data['layers']} layers)"
    return [Section(title, ("way", "us, median (p99)", "of bare", "bar"), rows, notes)]
