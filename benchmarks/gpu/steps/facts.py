"""What the device and its driver are, and what a page costs with them."""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys

from benchmarks.gpu.driver_calls import DriverCalls, has_torch
from benchmarks.gpu.findings import Findings
from kvelastic import _vmm
from kvelastic.device import page_size
from kvelastic.units import format_size

ATTRIBUTES = {
    "multiprocessors": 16,
    "L2 bytes": 38,
    "compute capability, major": 75,
    "compute capability, minor": 76,
    "virtual memory management": 102,
    "pages as file descriptors": 103,
    "GPUDirect RDMA with pages": 110,
}
GRANULARITIES = {"minimum": 0, "recommended": 1}
ROUNDS = 5
STARTS, AT_ONCE = 10, 5


class _Properties(ctypes.Structure):
    """CUmemAllocationProp of memory that lies on device 0."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


def main() -> None:
    def one(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--decide", action="store_true", help="print a start's page size")

    with Findings.of_command(__doc__, one) as found:
        if found.arguments.decide:
            driver = _vmm.CudaDriver("cuda")
            print(page_size.for_price(page_size.measured_price_us(driver), driver.total_bytes))
            return
        cuda, driver = DriverCalls(), _vmm.CudaDriver("cuda")
        found.line(f"Driver for CUDA {cuda.driver_version()}; {driver.uuid}.")
        total, free = driver.total_bytes, driver.free_bytes
        found.figure("total_bytes", total)
        found.figure("free_bytes", free)
        found.line(f"{format_size(free)} of {format_size(total)} free.")
        for name, number in ATTRIBUTES.items():
            value = cuda.attribute(number)
            found.figure(name, value)
        found.line("; ".join(f"{name}: {cuda.attribute(n)}" for name, n in ATTRIBUTES.items()))
        properties = _Properties(type=1, location_type=1)
        for name, which in GRANULARITIES.items():
            granularity = cuda.get("cuMemGetAllocationGranularity", ctypes.byref(properties), which)
            found.line(f"Granularity, {name}: {format_size(granularity)}.")
            found.figure(f"granularity_{name}_bytes", granularity)
        found.check(
            "kvelastic's granularity is the minimum",
            driver.granularity_bytes == found.figures["granularity_minimum_bytes"],
        )
        found.check(
            "pages can be exported", cuda.attribute(ATTRIBUTES["pages as file descriptors"]) == 1
        )
        prices = [page_size.measured_price_us(driver) for _ in range(ROUNDS)]
        size = page_size.for_price(min(prices), total)
        found.figure("page_price_us", min(prices))
        found.figure("default_page_bytes", size)
        found.line(
            f"A page costs {min(prices):.0f} us from creation to end ({ROUNDS} looks:"
            f" {', '.join(f'{each:.0f}' for each in prices)}); so the default page is"
            f" {format_size(size)}."
        )
        if has_torch():  # a simulated driver's prices are this processor's, at any moment
            sizes = _decisions()
            found.check(
                f"{STARTS} starts, {AT_ONCE} at once, decide on one page size",
                len(set(sizes)) == 1,
                ", ".join(map(format_size, sizes)),
            )


def _decisions() -> list[int]:
    """The page sizes that processes decide on, each without a ledger."""
    command = [sys.executable, "-m", "benchmarks.gpu.steps.facts", "--decide"]
    sizes: list[int] = []
    for _ in range(0, STARTS, AT_ONCE):
        started = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(AT_ONCE)
        ]
        sizes += [int(process.communicate()[0]) for process in started]
    return sizes


if __name__ == "__main__":
    main()
