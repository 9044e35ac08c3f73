"""Part 1: microseconds of each driver call at 2 to 256 MiB a page.

A page lives once a round: reserve its addresses, create, map, set_access, (touch), unmap, destroy,
release. All sizes take turns in a round, so a slow moment of the machine falls on all of them.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import Any

from benchmarks.vmm import driver_kinds
from benchmarks.vmm.models import MIB
from benchmarks.vmm.section import Section, median_p99

TITLE = "Driver calls"
SIZES_MIB = (2, 4, 8, 16, 32, 64, 128, 256)
CALLS = ("reserve", "create", "map", "set_access", "unmap", "destroy", "release")
FULL: dict[str, Any] = {"rounds": 100, "sizes_mib": SIZES_MIB}
QUICK: dict[str, Any] = {"rounds": 3, "sizes_mib": (2, 16)}

Samples = dict[str, dict[str, list[float]]]


def measure(kind: str, *, rounds: int, sizes_mib: list[int]) -> dict[str, Any]:
    """`us[call][MiB]`: a sample a round, in microseconds; the first round only warms up."""
    driver: Any = driver_kinds.open_bare(kind)
    us: Samples = {call: {str(size): [] for size in sizes_mib} for call in CALLS}
    for turn in range(rounds + 1):
        for size in sizes_mib:
            for call, took_us in one_life_us(driver, size * MIB, touch=kind == driver_kinds.HOST):
                if turn > 0:
                    us[call][str(size)].append(took_us)
    told: dict[str, Any] = {"us": us}
    if kind != driver_kinds.HOST:
        told["ctypes_us"] = driver.ctypes_us()
    return told


def one_life_us(driver: Any, page_bytes: int, *, touch: bool) -> list[tuple[str, float]]:
    """The calls of a page's life in order, each with its microseconds."""
    took: list[tuple[str, float]] = []

    def timed(call: str, *arguments: int) -> int:
        start = time.perf_counter_ns()
        result = getattr(driver, call)(*arguments)
        took.append((call, (time.perf_counter_ns() - start) / 1000))
        return result

    address = timed("reserve", page_bytes)
    handle = timed("create", page_bytes)
    timed("map", address, page_bytes, handle)
    timed("set_access", address, page_bytes)
    # On the host an untouched page has no page tables, and unmapping nothing is cheap.
    for offset in range(0, page_bytes if touch else 0, 2 * MIB):
        ctypes.memset(address + offset, 1, 64)
    timed("unmap", address, page_bytes)
    timed("destroy", handle, page_bytes)
    timed("release", address, page_bytes)
    return took


def sections(data: dict[str, Any], kind: driver_kinds.DriverKind) -> list[Section]:
    sizes = list(data["us"]["map"])
    rows = [
        (call, *(median_p99(data["us"][call][size]) for size in sizes))
        for call in CALLS
    ]  # fmt: skip
    notes = [
        "destroy gives the memory back (cuMemRelease), release the addresses (cuMemAddressFree)."
    ]
    if "ctypes_us" in data:
        notes.append(f"ctypes' own part of each figure: about {data['ctypes_us']:.2f} us.")
    if kind.name == driver_kinds.SIMULATED:
        notes.append(
            "The simulator waits for these times on purpose (profile a100): they show that it keeps"
            " to its profile and say nothing about a GPU. release has no delay."
        )
    title = f"{TITLE}: us by MiB a page, median (p99)"
    return [Section(title, ("call", *(f"{size} MiB" for size in sizes)), rows, notes)]


def curves(data: dict[str, Any]) -> dict[str, list[tuple[int, float, float]]]:
    """For the plot: by call `(MiB, median us, p99 us)`."""
    from benchmarks.vmm.section import p99

    return {
        call: [(int(size), statistics.median(us), p99(us)) for size, us in by_size.items()]
        for call, by_size in data["us"].items()
    }
