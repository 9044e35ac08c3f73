"""What happens where the default stream alone is named, and a kernel runs in a non-blocking one.

It is expected that the unmap does not wait and that the kernel then meets an illegal access: this
is why streams are named. A driver that orders them all the same would be worth knowing. A driver
that was told of no stream must refuse to unmap.
"""

from __future__ import annotations

import os
import time

from benchmarks.gpu.driver_calls import SUCCESS, DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.vmm import own_pages
from benchmarks.vmm.models import LLAMA_3_8B
from kvelastic import _vmm
from kvelastic.errors import KvelasticError, StreamsUnknownError

DEFAULT_STREAM = 0


def main() -> None:
    with Findings.of_command(__doc__) as found:
        kernel_s = 1.0
        cuda, driver = DriverCalls(), _vmm.CudaDriver("cuda")
        memory = own_pages.reserve(driver, LLAMA_3_8B.paged(), 2)
        memory.map([0, 1])
        try:
            memory.unmap([1])
            refused = ""
        except StreamsUnknownError as error:
            refused = str(error)
        found.check(
            "a driver that knows no stream unmaps nothing", memory.is_mapped(1) and bool(refused)
        )
        driver.use_streams([DEFAULT_STREAM])
        stream = cuda.new_stream()
        with cuda.busy(stream, 0.001):  # else its module is loaded behind the kernel, and waits
            cuda.fill(memory.address, 7, memory.geometry.page_bytes, stream)
        cuda.error()
        begun = time.monotonic()
        with cuda.busy(stream, kernel_s):
            page_bytes = memory.geometry.page_bytes
            cuda.fill(memory.address + page_bytes, 7, page_bytes, stream)
            try:
                memory.unmap([1], destroy=True)
                said = "it went on"
            except KvelasticError as error:
                said = str(error)
        took_s = time.monotonic() - begun
        answer = cuda.error()
        found.figure("unmap_took_s", took_s)
        found.figure("context_answers", answer)
        found.line(
            f"With the default stream alone named, an unmap under a kernel of {kernel_s} s in a"
            f" non-blocking stream took {took_s * 1000:.1f} ms ({said}); then the context answers"
            f" {answer}."
        )
        ordered = took_s >= 0.8 * kernel_s and answer == SUCCESS
        found.line(
            "This driver orders the two: it is not what is documented."
            if ordered
            else "So a stream must be named."
        )
    # Not by the way of destructors: the context may be lost.
    os._exit(0)


if __name__ == "__main__":
    main()
