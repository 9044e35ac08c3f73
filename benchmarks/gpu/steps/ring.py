"""vLLM's way without vLLM: a scheduler with no CUDA, a worker that maps, kernels in the worker.

What an alloc costs that needs a page, on an idle device and beside kernels; and what a page that
goes back has to wait for. The scheduler's process never opens a device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from benchmarks.gpu.findings import Findings
from benchmarks.vmm.section import Section, median_p99
from kvelastic import _vmm
from kvelastic.shared import segment

GRANULE = 2 << 20
BLOCKS = 8


def _geometry(pages: int, page_bytes: int) -> _vmm.Geometry:
    return _vmm.Geometry(
        pages=pages, extent_bytes=page_bytes, block_bytes=page_bytes // BLOCKS,
        blocks_per_page=BLOCKS,
    )  # fmt: skip


def main() -> None:
    def worker(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--worker", nargs=3, metavar=("SEGMENT", "PAGES", "MIB"))

    with Findings.of_command(__doc__, worker) as found:
        if found.arguments.worker:
            _serve(*found.arguments.worker)
            return
        rows = []
        for mib in (2, 64):
            rows += _measure(found, mib)
        header = ("MiB a page", "device", "alloc of a page", "free and trim")
        found.table(Section("Over the ring, us, median (p99)", header, rows))


def _measure(found: Findings, mib: int) -> list[tuple[str, ...]]:
    pages, rounds = 16, 5 if found.quick else 100
    whole = _geometry(pages, mib << 20)
    rows: list[tuple[str, ...]] = []
    with segment.create(f"gpu_ring_{os.getpid()}_{mib}", engine="test", device="cuda") as seg:
        ring = _vmm.Ring.create(seg.control_block, whole, 60.0)
        command = [sys.executable, "-m", __spec__.name, "--worker", seg.name, str(pages), str(mib)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                ring.wait_for_workers(60.0)
                pool = _vmm.Pool(
                    ring,
                    max_blocks=pages * BLOCKS,
                    limit_bytes=pages * whole.page_bytes,
                    capacity_bytes=pages * whole.page_bytes,
                    preallocate=False,
                )
                pool.ensure(1)
                for how in ("idle", "busy"):
                    child.stdin.write(how + "\n")
                    child.stdin.flush()
                    child.stdout.readline()
                    took, back = [], []
                    pool.free(pool.alloc(BLOCKS - 1) or [])
                    keep = pool.alloc(BLOCKS - 1)  # page 0 is full: the next one needs a page
                    for _ in range(rounds):
                        begun = time.perf_counter_ns()
                        ids = pool.alloc(BLOCKS)
                        took.append((time.perf_counter_ns() - begun) / 1000)
                        assert ids is not None
                        begun = time.perf_counter_ns()
                        pool.free(ids)
                        pool.trim()
                        back.append((time.perf_counter_ns() - begun) / 1000)
                    pool.free(keep or [])
                    rows.append((str(mib), how, median_p99(took), median_p99(back)))
                    found.figure(f"alloc_us_{mib}_{how}", statistics.median(took))
                    found.figure(f"back_us_{mib}_{how}", statistics.median(back))
                pool.check_integrity()
                child.stdin.write("end\n")
                child.stdin.flush()
                said = child.stdout.readline().strip()
                found.check(f"{mib} MiB: the worker's kernels met no address without memory",
                            said == "CUDA_SUCCESS", said)  # fmt: skip
            finally:
                child.stdin.close()
                child.wait(60)
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        found.check(f"{mib} MiB: the scheduler has opened no device", "nvidia" not in maps.read())
    return rows


def _serve(name: str, pages: str, mib: str) -> None:
    """The worker: a thread serves the ring; this one keeps a stream busy when told to."""
    from benchmarks.gpu.driver_calls import DriverCalls
    from kvelastic.device.selection import reserve_range

    cuda, driver = DriverCalls(), _vmm.CudaDriver("cuda")
    stream = cuda.new_stream()
    driver.use_streams([stream])
    memory = reserve_range(driver, _geometry(int(pages), int(mib) << 20), guard_pages=False)
    with segment.open_writable(name) as seg:
        worker = _vmm.RingWorker.start(seg.control_block, memory, 0)
        for line in iter(sys.stdin.readline, ""):
            how = line.strip()
            if how == "end":
                break
            if how == "busy" and not cuda.has("kvsim_count"):
                _keep_busy(stream)
            print(how, flush=True)
        _end_busy()
        print(cuda.error(), flush=True)
        worker.stop()


_stop: list[bool] = []


def _keep_busy(stream: int) -> None:
    """Matrix products of a millisecond or so, a few ahead, from a thread."""
    import threading

    import torch

    left, right = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    torch.matmul(left, right)
    torch.cuda.synchronize()

    def work() -> None:
        ahead = []
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            while not _stop:
                torch.matmul(left, right)
                event = torch.cuda.Event()
                event.record()
                ahead.append(event)
                if len(ahead) > 8:
                    ahead.pop(0).synchronize()

    threading.Thread(target=work, daemon=True).start()


def _end_busy() -> None:
    _stop.append(True)
    time.sleep(0.1)


if __name__ == "__main__":
    main()
