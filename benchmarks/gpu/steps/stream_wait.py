"""An unmap waits for the kernels of a non-blocking stream that was named; others go on."""

from __future__ import annotations

import threading
import time

from benchmarks.gpu.driver_calls import SUCCESS, DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.vmm import own_pages
from benchmarks.vmm.models import LLAMA_3_8B
from kvelastic import _vmm

PAGES = 8


def main() -> None:
    with Findings.of_command(__doc__) as found:
        kernel_s = 1.0
        cuda, driver = DriverCalls(), _vmm.CudaDriver("cuda")
        stream = cuda.new_stream()
        driver.use_streams([stream])
        memory = own_pages.reserve(driver, LLAMA_3_8B.paged(), PAGES)
        page_bytes = memory.geometry.page_bytes
        memory.map([0, 1])
        page = memory.address + page_bytes
        # What is loaded at its first use is loaded now: a module that is loaded behind a kernel
        # waits for it, and all calls of the context with it.
        with cuda.busy(stream, 0.001):
            cuda.fill(memory.address, 7, page_bytes, stream)
        cuda.error()
        ended: list[float] = []

        def unmap() -> None:
            memory.unmap([1], destroy=True)
            ended.append(time.monotonic())

        begun = time.monotonic()
        with cuda.busy(stream, kernel_s) as work:
            queued = cuda.fill(page, 7, page_bytes, stream)
            found.check("a write is queued behind the kernel", queued == SUCCESS, queued)
            thread = threading.Thread(target=unmap)
            thread.start()
            memory.map([2])
            took_ms = (time.monotonic() - begun) * 1000
            thread.join(kernel_s / 4)  # time enough for an unmap that does not wait
            found.check("a map goes on meanwhile", not ended, f"{took_ms:.1f} ms")
        thread.join(60)
        found.check("the unmap came to its end", bool(ended))
        waited_s = ended[0] - begun if ended else 0.0
        found.figure("unmap_waited_s", waited_s)
        found.check(
            "the unmap waited for the kernel",
            bool(ended) and ended[0] >= work.lasts_until,
            f"{waited_s:.3f} s",
        )
        found.check(
            "no kernel met an address without memory", cuda.error() == SUCCESS, cuda.error()
        )
        memory.map([1])
        found.check("the page can be had again", memory.is_mapped(1))
        memory.check_integrity()


if __name__ == "__main__":
    main()
