"""Part 7: an alloc that needs a page, while pages wait to be unmapped behind a kernel.

The simulator holds a kernel on a non-blocking stream that the driver was told of; a trim of another
thread waits for it. Meanwhile an alloc takes a new page: once over a range of this process, once
over a ring to a worker's thread. On an idle device the same alloc costs what the driver asks for
the page, and the simulator waits as long as a GPU was reported to take for that.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.vmm import driver_kinds, own_pages
from benchmarks.vmm.models import LLAMA_3_8B
from benchmarks.vmm.section import Section, median_p99, number

if TYPE_CHECKING:
    from kvelastic import _vmm

TITLE = "An alloc beside an unmap that waits for a kernel"
PAGES = 16
PARKED = 3
NON_BLOCKING = 1
TARGET_MS = 5
FULL: dict[str, Any] = {"rounds": 5, "kernel_s": 1.0}
QUICK: dict[str, Any] = {"rounds": 2, "kernel_s": 0.05}


class HeldStream:
    """A stream of the simulator, and the kernel that lasts on it."""

    def __init__(self, driver: _vmm.Driver) -> None:
        self._sim = ctypes.CDLL("libcuda.so.1")
        self._sim.kvsim_count.restype = ctypes.c_uint64
        context = ctypes.c_void_p()
        _check(self._sim.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        _check(self._sim.cuCtxSetCurrent(context))
        self._stream = ctypes.c_void_p()
        _check(self._sim.cuStreamCreate(ctypes.byref(self._stream), NON_BLOCKING))
        driver.use_streams([self._stream.value])  # type: ignore[attr-defined]

    @contextmanager
    def kernel(self, seconds: float) -> Iterator[None]:
        """A kernel that lasts so long, and longer if what is done beside it does."""
        until = time.monotonic() + seconds
        _check(self._sim.kvsim_hold_stream(self._stream))
        try:
            yield
            time.sleep(max(until - time.monotonic(), 0))
        finally:
            _check(self._sim.kvsim_release_stream(self._stream))

    def looks(self) -> int:
        """How often somebody has looked whether it is done."""
        return int(self._sim.kvsim_count(b"cuEventQuery"))


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"the simulated driver answered {result}")


def measure(kind: str, *, rounds: int, kernel_s: float) -> dict[str, Any]:
    """Microseconds of the alloc: `local` and `ring`, each `quiet` and `beside` the kernel."""
    from kvelastic import _vmm
    from kvelastic.pool.pool import native_geometry
    from kvelastic.shared import segment

    layout = LLAMA_3_8B.paged()
    driver = driver_kinds.open_seam(kind)
    stream = HeldStream(driver)
    local = own_pages.pool_over(own_pages.reserve(driver, layout, PAGES))
    us = {"local": _rounds(local, stream, layout.blocks_per_page, rounds, kernel_s)}
    with segment.create("kvbench_waiting_unmap", engine="bench", device="cuda") as shared:
        geometry = native_geometry(layout, PAGES)
        ring = _vmm.Ring.create(shared.control_block, geometry, 30.0)
        worker = _vmm.RingWorker.start(
            shared.control_block, own_pages.reserve(driver, layout, PAGES)
        )
        try:
            ring.wait_for_workers(30.0)
            pool = own_pages.pool_over(ring)
            us["ring"] = _rounds(pool, stream, layout.blocks_per_page, rounds, kernel_s)
        finally:
            worker.stop()
    return {"us": us, "kernel_s": kernel_s, "page_bytes": layout.page_bytes}


def _rounds(
    pool: _vmm.Pool, stream: HeldStream, page: int, rounds: int, kernel_s: float
) -> dict[str, list[float]]:
    """`page` is how many blocks a page has."""
    us: dict[str, list[float]] = {"quiet": [], "beside": []}
    pool.alloc(page - 1)  # the null block's page stays full: each alloc takes a page
    for turn in range(rounds + 1):
        quiet = _alloc_us(pool, page)
        pool.free(pool.alloc(PARKED * page) or [])
        with stream.kernel(kernel_s):
            seen = stream.looks()
            trim = threading.Thread(target=pool.trim)
            trim.start()
            while stream.looks() == seen:
                pass
            beside = _alloc_us(pool, page, trims=False)
            if not trim.is_alive():
                raise RuntimeError("the trim did not wait for the kernel")
        trim.join()
        pool.trim()
        if turn > 0:  # the first warms up
            us["quiet"].append(quiet)
            us["beside"].append(beside)
    return us


def _alloc_us(pool: _vmm.Pool, page: int, *, trims: bool = True) -> float:
    start = time.perf_counter_ns()
    ids = pool.alloc(page)
    took_us = (time.perf_counter_ns() - start) / 1000
    if ids is None:
        raise RuntimeError("there was no page to be had")
    pool.free(ids)
    if trims:
        pool.trim()
    return took_us


def sections(data: dict[str, Any], kind: driver_kinds.DriverKind) -> list[Section]:
    rows = []
    for name, where in (("local", "in one process"), ("ring", "over the ring")):
        us = data["us"][name]
        over_ms = (statistics.median(us["beside"]) - statistics.median(us["quiet"])) / 1000
        rows.append(
            (where, median_p99(us["quiet"]), median_p99(us["beside"]), number(over_ms) + " ms")
        )
    notes = [
        f"us of an alloc that takes a page of {data['page_bytes'] >> 20} MiB, created anew; the"
        f" kernel lasts {data['kernel_s']:g} s. Target: less than {TARGET_MS} ms over the quiet."
    ]
    return [Section(TITLE, ("", "quiet", "beside", "over"), rows, notes)]
