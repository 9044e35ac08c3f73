"""Pages of 2 MiB on the host driver, against a memset of as many bytes; a pool over 1 TiB."""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

from benchmarks.harness import Figure

PAGE = 2 << 20
PAGES = 128
TEBIBYTE = 1 << 40


def _us(start_ns: int) -> float:
    return (time.perf_counter_ns() - start_ns) / 1000


def page_statistics() -> list[Figure]:
    from kvelastic import _vmm

    geometry = _vmm.Geometry(
        pages=PAGES, extent_bytes=PAGE, block_bytes=PAGE // 16, blocks_per_page=16
    )
    memory = _vmm.Range.reserve(_vmm.HostDriver(), geometry)
    # A memset runs at full speed only in cache; a new page never is, so neither is this memory.
    plain = mmap.mmap(-1, PAGES * PAGE)
    plain.madvise(mmap.MADV_HUGEPAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(plain))
    ctypes.memset(base, 1, PAGES * PAGE)

    memset = "memset of 2 MiB"
    new = Figure("new page (create + map)", "us", [], "<= 3 x memset", memset)
    recycled = Figure("recycled page: map", "us", [], "<= 6 us", memset)
    unmap = Figure("unmap, page kept", "us", [], "<= 5 us", memset)
    touch = Figure("first touch of a recycled page", "us", [], "", memset)
    for _ in range(4):
        for page in range(PAGES):
            start = time.perf_counter_ns()
            ctypes.memset(base + page * PAGE, page & 255, PAGE)
            floor = _us(start)
            start = time.perf_counter_ns()
            memory.map([page])
            new.samples.append(_us(start))
            new.floor_samples.append(floor)
            ctypes.memset(memory.address + page * PAGE, 1, 64)
        memory.unmap(range(PAGES))
        for page in range(PAGES):
            # Another page's handle each time: nothing is mapped where it was before.
            start = time.perf_counter_ns()
            memory.map([page])
            recycled.samples.append(_us(start))
            start = time.perf_counter_ns()
            ctypes.memset(memory.address + page * PAGE, 1, 64)
            touch.samples.append(_us(start))
            start = time.perf_counter_ns()
            memory.unmap([page])
            unmap.samples.append(_us(start))
        memory.trim()
    for figure in (recycled, unmap, touch):
        figure.floor_samples = new.floor_samples
    return [new, recycled, touch, unmap]


def rss_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def big_pool_figures() -> list[Figure]:
    from kvelastic import _vmm

    made = Figure("pool over 1 TiB: made", "ms", [], "<= 10 ms")
    resident = Figure("pool over 1 TiB: resident", "MiB", [], "<= 64 MiB")
    driver = _vmm.HostDriver()
    for _ in range(15):
        before = rss_mib()
        start = time.perf_counter_ns()
        geometry = _vmm.Geometry(
            pages=TEBIBYTE // PAGE, extent_bytes=PAGE, block_bytes=PAGE // 16, blocks_per_page=16
        )
        memory = _vmm.Range.reserve(driver, geometry)
        pool = _vmm.Pool(
            memory, max_blocks=16 * geometry.pages, limit_bytes=TEBIBYTE, capacity_bytes=TEBIBYTE
        )
        made.samples.append(_us(start) / 1000)
        ids = pool.alloc(100)
        resident.samples.append(rss_mib() - before)
        assert ids is not None
        pool.free(ids)
    return [made, resident]


def figures() -> list[Figure]:
    return page_statistics() + big_pool_figures()
