"""kill -9 of one of two instances: the device has its memory back, the other one can take it."""

from __future__ import annotations

import time

from benchmarks.gpu.driver_calls import DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.instances import Group
from benchmarks.ledger.instance import BLOCKS_PER_PAGE
from benchmarks.vmm import scarce_device
from kvelastic import _vmm
from kvelastic.shared import ledger

PAGE_MIB, INSTANCES = 16, 2
PAGE_BYTES = PAGE_MIB << 20
PATIENCE_S = 30.0
OTHERS_BYTES = 64 << 20


def main() -> None:
    with Findings.of_command(__doc__) as found:
        pages = 16 if found.quick else 256
        cuda = DriverCalls()
        total = cuda.free_bytes()
        driver = _vmm.CudaDriver("cuda")
        # Both together want more than the group may hold.
        shared_bytes = pages * PAGE_BYTES * 3 // 2
        with Group() as group:
            share = scarce_device.utilization(
                driver, shared_bytes, PAGE_MIB, INSTANCES, group.environ
            )
        with (
            Group(KVELASTIC_GPU_UTILIZATION=share) as group,
            group.instance(pages + 1, PAGE_MIB) as victim,
            group.instance(pages + 1, PAGE_MIB) as other,
        ):
            victim.read()
            other.read()
            contexts = group.wait_until_counted(driver, PATIENCE_S)
            found.check("the ledger counts both contexts", contexts)
            blocks = pages * BLOCKS_PER_PAGE
            taken = victim.ask("alloc", blocks - 1)["result"]
            found.check("one takes its memory", taken is not None)
            # A look between a grant and its mapping takes the context for smaller than it is.
            group.wait_until_counted(driver, PATIENCE_S)
            refused = other.ask("alloc", blocks - 1)["result"]
            found.check("there is not as much for the other one", refused is None)
            victim.process.kill()
            victim.process.wait()
            begun = time.monotonic()
            answer = other.ask("alloc_until", blocks - 1, PATIENCE_S)["result"]
            found.check("the other one takes what the killed one held", answer["ids"] is not None)
            found.figure("taken_after_ms", answer["done_ms"])
            found.line(
                f"{pages * PAGE_MIB} MiB of the killed one were the other one's"
                f" {(time.monotonic() - begun) * 1000:.0f} ms after the kill."
            )
            ledger.reap()
            names = [member.pid for member in group.ledger().members]
            found.check("the ledger has the living one alone", names == [other.pid], str(names))
            victim.close()
        ended = time.monotonic()
        while cuda.free_bytes() < total - OTHERS_BYTES and time.monotonic() - ended < PATIENCE_S:
            time.sleep(0.01)
        left = total - cuda.free_bytes()
        found.check(
            "the device has everything back", left <= OTHERS_BYTES, f"{left} bytes are left"
        )


if __name__ == "__main__":
    main()
