"""What the bare calls answer beside kernels (NOT_READY is known of set_access), and their time."""

from __future__ import annotations

import statistics
import time
from collections import Counter

import torch

from benchmarks.gpu.driver_calls import NOT_READY, DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.vmm.bare_cuda import CudaError
from benchmarks.vmm.section import Section, median_p99

PAGE_BYTES = 2 << 20
CALLS = ("map", "set_access", "unmap")
SIDE = 8192
PATIENCE_S = 10.0


def main() -> None:
    with Findings.of_command(__doc__) as found:
        cuda = DriverCalls()
        address, handle = cuda.reserve(PAGE_BYTES), cuda.create(PAGE_BYTES)
        left, right = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda") for _ in "ab")
        product = torch.empty_like(left)
        rows = []
        answers: Counter[str] = Counter()
        for name, kernels in (("idle", 0), ("beside matrix products", 200)):
            took: dict[str, list[float]] = {call: [] for call in CALLS}
            for _ in range(kernels):
                torch.matmul(left, right, out=product)
            last = torch.cuda.Event()
            last.record()
            rounds = 0
            while rounds < 100 or (kernels and not last.query() and rounds < 5000):
                rounds += 1
                for call in CALLS:
                    arguments = (address, PAGE_BYTES) + ((handle,) if call == "map" else ())
                    begun = time.perf_counter_ns()
                    answers.update(_until_done(cuda, call, arguments))
                    took[call].append((time.perf_counter_ns() - begun) / 1000)
            torch.cuda.synchronize()
            rows.append((name, str(rounds), *(median_p99(took[call]) for call in CALLS)))
            found.figure(f"{name} us", {c: statistics.median(took[c]) for c in CALLS})
        found.table(
            Section("Calls of a 2 MiB page, us, median (p99)", ("", "rounds", *CALLS), rows)
        )
        found.figure("not_ready", dict(answers))
        found.line(f"Answers of NOT_READY: {dict(answers) or 'none'}.")


def _until_done(cuda: DriverCalls, call: str, arguments: tuple[int, ...]) -> list[str]:
    """Calls until it is ready; the call's name for each time that it was not."""
    not_ready: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while not _is_ready(cuda, call, arguments):
        not_ready.append(call)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{call} answers NOT_READY for {PATIENCE_S} s")
    return not_ready


def _is_ready(cuda: DriverCalls, call: str, arguments: tuple[int, ...]) -> bool:
    try:
        getattr(cuda, call)(*arguments)
    except CudaError as error:
        if NOT_READY not in str(error):
            raise
        return False
    return True


if __name__ == "__main__":
    main()
