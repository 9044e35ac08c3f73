"""What a page's price depends on besides: flags of its creation, its size, runs in one call.

kvelastic creates pages that can be exported and that RDMA reaches; the bare calls of the other
steps do not. And it gives access to a run, and unmaps it, with one call each.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial

from benchmarks.gpu.driver_calls import DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.steps.facts import _Properties
from benchmarks.vmm.section import Section, median_p99
from kvelastic import _vmm

MIB = 1 << 20
KINDS = {"plain": (0, 0), "exportable": (1, 0), "for RDMA": (0, 1), "both, as kvelastic": (1, 1)}


def _us(call: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1000


def main() -> None:
    with Findings.of_command(__doc__) as found:
        cuda = DriverCalls()
        rounds = 5 if found.quick else 60
        _creations(found, cuda, rounds)
        _runs(found, cuda, rounds)
        _questions(found, cuda, rounds * 10)


def _creations(found: Findings, cuda: DriverCalls, rounds: int) -> None:
    rows, figures = [], {}
    for mib in (2, 64):
        for name, (handles, rdma) in KINDS.items():
            flags = (ctypes.c_ubyte * 8)(0, rdma)
            wanted = _Properties(type=1, handle_types=handles, location_type=1, flags=flags)
            create, release = [], []
            try:
                for _ in range(rounds):
                    handle = ctypes.c_uint64()
                    place, asked, size = ctypes.byref(handle), ctypes.byref(wanted), mib * MIB
                    create.append(_us(partial(cuda.call, "cuMemCreate", place, size, asked, 0)))
                    release.append(_us(partial(cuda.call, "cuMemRelease", handle.value)))
            except Exception as error:
                rows.append((str(mib), name, str(error), ""))
                continue
            rows.append((str(mib), name, median_p99(create), median_p99(release)))
            figures[f"{mib} {name}"] = statistics.median(create)
    found.figure("create_us", figures)
    found.table(
        Section("cuMemCreate by flags, us, median (p99)", ("MiB", "", "create", "release"), rows)
    )


def _runs(found: Findings, cuda: DriverCalls, rounds: int) -> None:
    rows, figures = [], {}
    for mib, count in ((2, 1), (2, 16), (2, 128), (16, 8), (64, 1), (64, 8)):
        size, total = mib * MIB, mib * MIB * count
        address = cuda.reserve(total)
        handles = [cuda.create(size) for _ in range(count)]
        access, unmap = [], []
        for _ in range(rounds):
            for i, handle in enumerate(handles):
                cuda.map(address + i * size, size, handle)
            access.append(_us(partial(cuda.set_access, address, total)))
            unmap.append(_us(partial(cuda.unmap, address, total)))
        for handle in handles:
            cuda.destroy(handle, size)
        cuda.release(address, total)
        rows.append((f"{count} x {mib} MiB", median_p99(access), median_p99(unmap)))
        figures[f"{count}x{mib}"] = (statistics.median(access), statistics.median(unmap))
    found.figure("runs_us", figures)
    found.table(Section("A run in one call, us, median (p99)", ("", "set_access", "unmap"), rows))


def _questions(found: Findings, cuda: DriverCalls, rounds: int) -> None:
    driver = _vmm.CudaDriver("cuda")
    stream = cuda.new_stream()
    driver.use_streams([stream])
    asked = {
        "cuMemGetInfo": cuda.free_bytes,
        "kvelastic's look at the device": lambda: driver.free_bytes,
        "a fence of an idle stream, marked and passed": driver.drain,
    }
    rows = []
    for name, call in asked.items():
        took = [_us(call) for _ in range(rounds)]
        rows.append((name, median_p99(took)))
        found.figure(f"{name} us", statistics.median(took))
    found.table(Section("Questions, us, median (p99)", ("", "us"), rows))


if __name__ == "__main__":
    main()
