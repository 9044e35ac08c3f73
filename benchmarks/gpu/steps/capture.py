"""A capture in global mode goes on beside every call of kvelastic's, of this thread and another."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

from benchmarks.gpu.driver_calls import GLOBAL, SUCCESS, DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.vmm import own_pages
from benchmarks.vmm.models import LLAMA_3_8B
from kvelastic import _vmm

THREAD_LOCAL = 1


def main() -> None:
    with Findings.of_command(__doc__) as found:
        cuda, driver = DriverCalls(), _vmm.CudaDriver("cuda")
        kernels = cuda.new_stream()
        driver.use_streams([0, kernels])
        layout = LLAMA_3_8B.paged()
        scratch = cuda.get("cuMemAlloc_v2", 4096)

        def work() -> None:
            memory = own_pages.reserve(driver, layout, 4)
            memory.map([0, 1, 2])
            memory.copy([layout.first_id(1)], [layout.first_id(0) + 1])
            memory.unmap([1])
            memory.unmap([2], destroy=True)
            assert driver.free_bytes < driver.total_bytes
            fresh = _vmm.CudaDriver("cuda")
            fresh.use_streams([])
            fresh.drain()

        work()  # what is made at the first use is made before
        for flags, kind in ((1, "a non-blocking stream"), (0, "a blocking stream")):
            for mode, name in ((GLOBAL, "global"), (THREAD_LOCAL, "thread-local")):
                stream = cuda.new_stream(flags)
                cuda.begin_capture(stream, mode)
                cuda.fill(scratch, 1, 64, stream)
                failures = [*_failure("this thread", work), *_failure_of_a_thread(work)]
                gc.collect()
                answer = cuda.end_capture(stream)
                found.check(
                    f"captured in {kind}, mode {name}",
                    answer == SUCCESS and not failures,
                    "; ".join([answer, *failures]),
                )


def _failure(where: str, work: Callable[[], None]) -> list[str]:
    """What went wrong; empty where nothing did."""
    try:
        work()
    except Exception as error:
        return [f"{where}: {error}"]
    return []


def _failure_of_a_thread(work: Callable[[], None]) -> list[str]:
    failures: list[str] = []
    thread = threading.Thread(target=lambda: failures.extend(_failure("another", work)))
    thread.start()
    thread.join()
    return failures


if __name__ == "__main__":
    main()
