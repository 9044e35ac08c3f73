"""What kernels' launches wait while another thread of the process maps and unmaps pages.

An engine's thread launches hundreds of small kernels a step. A driver call that holds the context's
lock meanwhile shows here, and nowhere else: kernels that are queued already run on.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.findings import Findings
from benchmarks.vmm.models import MIB
from benchmarks.vmm.section import Section, p99
from kvelastic import _vmm

SIZES = ((2, 64), (2, 1), (64, 8), (64, 1))
"""MiB a page, pages a batch."""


def main() -> None:
    with Findings.of_command(__doc__) as found:
        launches = 2_000 if found.quick else 20_000
        driver = _vmm.CudaDriver("cuda")
        driver.use_streams([])
        small = torch.zeros(1024, device="cuda")
        graph = _graph(small)
        rows = []
        for name, thread in (("alone", None), *((f"{n} x {m} MiB", (m, n)) for m, n in SIZES)):
            stop, calls = threading.Event(), [0]
            other = None
            if thread:
                other = threading.Thread(target=_churn, args=(driver, *thread, stop, calls))
                other.start()
            eager = _launch_us(lambda: small.add_(1), launches)
            replay = _launch_us(graph.replay, launches // 20)
            stop.set()
            if other:
                other.join()
            rows.append((name, *_cells(eager), *_cells(replay), str(calls[0])))
            seen = {
                "eager_p50": statistics.median(eager),
                "eager_p99": p99(eager),
                "eager_max": max(eager),
                "graph_p99": p99(replay),
            }
            found.figure(name, seen)
        heads = ("beside", "launch p50", "p99", "max", "graph p50", "p99", "max", "batches")
        found.table(Section("Launches beside map and unmap, us", heads, rows))


def _cells(us: list[float]) -> tuple[str, str, str]:
    return (f"{statistics.median(us):.1f}", f"{p99(us):.1f}", f"{max(us):.0f}")


def _launch_us(call: Callable[[], object], count: int) -> list[float]:
    took = []
    for i in range(count):
        begun = time.perf_counter_ns()
        call()
        took.append((time.perf_counter_ns() - begun) / 1000)
        if i % 200 == 0:
            torch.cuda.synchronize()  # the queue is bounded: a full one would be what is measured
    torch.cuda.synchronize()
    return took


def _graph(small: torch.Tensor) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        small.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            small.add_(1)
    return graph


def _churn(
    driver: _vmm.CudaDriver, mib: int, pages: int, stop: threading.Event, calls: list[int]
) -> None:
    whole = _vmm.Geometry(pages=pages, extent_bytes=mib * MIB, block_bytes=mib * MIB // 8,
                          blocks_per_page=8)  # fmt: skip
    memory = _vmm.Range.reserve(driver, whole)
    every = list(range(pages))
    while not stop.is_set():
        memory.map(every)
        memory.unmap(every, destroy=True)
        calls[0] += 1


if __name__ == "__main__":
    main()
