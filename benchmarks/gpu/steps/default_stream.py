"""An unmap waits for kernels of the legacy default stream, where PyTorch computes unless told else.

The driver records no event in that stream: an event in a blocking stream of its own stands for it.
CUDA says that blocking streams wait for what was given to the default one; of a stream that is made
after that, and of an event with no work before it, it says nothing. Both are tried.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from benchmarks.gpu.driver_calls import SUCCESS, DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.vmm import own_pages
from benchmarks.vmm.models import LLAMA_3_8B
from kvelastic import _vmm

DEFAULT = 0
CASES = ("before the driver has a stream of its own", "when it has one")


def main() -> None:
    with Findings.of_command(__doc__) as found:
        cuda, driver = DriverCalls(), _vmm.CudaDriver("cuda")
        driver.use_streams([DEFAULT])
        memory = own_pages.reserve(driver, LLAMA_3_8B.paged(), 8)
        page_bytes = memory.geometry.page_bytes
        memory.map([0, 1, 2])
        with cuda.busy(DEFAULT, 0.001):
            pass
        # Kernels that a first use would load, behind the one that is to be waited for.
        cuda.fill(memory.address, 7, page_bytes, DEFAULT)
        cuda.error()
        for page, case in enumerate(CASES, 1):
            _one(found, cuda, memory, page, case)
        said = cuda.error()
        found.check("no kernel met an address without memory", said == SUCCESS, said)
    os._exit(0)  # the context may be lost


def _one(found: Findings, cuda: DriverCalls, memory: _vmm.Range, page: int, case: str) -> None:
    page_bytes = memory.geometry.page_bytes
    answers: list[str] = []

    def unmap() -> None:
        memory.unmap([page], destroy=True)
        answers.append(cuda.ask("cuStreamQuery", DEFAULT))

    with cuda.busy(DEFAULT, 0.5):
        cuda.fill(memory.address + page * page_bytes, 7, page_bytes, DEFAULT)
        thread = threading.Thread(target=_in_context(cuda, unmap))
        thread.start()
        thread.join(0.1)
        early = list(answers)
    thread.join(30)
    # Not by the clock: what counts is that the stream had nothing left when the unmap came back.
    found.check(
        f"an unmap waits for the default stream, {case}",
        not early and answers == [SUCCESS],
        f"then the stream answers {', '.join(answers) or 'nothing'}",
    )


def _in_context(cuda: DriverCalls, call: Callable[[], None]) -> Callable[[], None]:
    import ctypes

    def work() -> None:
        context = ctypes.c_void_p()
        cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        cuda.call("cuCtxSetCurrent", context)
        call()

    return work


if __name__ == "__main__":
    main()
