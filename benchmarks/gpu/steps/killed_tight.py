"""kill -9 of a process that fills the device and has pinned staging: how soon all of it is back.

The driver unpins the memory of a dead process before it frees its pages, so pinned memory makes the
device's come back later. A full device is what a neighbour that waits for it finds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.gpu.driver_calls import DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.vmm.section import Section
from kvelastic import _vmm
from kvelastic.errors import OutOfMemoryError

PAGE_BYTES = 64 << 20
LEFT_BYTES = 1 << 30
BLOCK_BYTES = 2 << 20
PATIENCE_S = 60.0
OTHERS_BYTES = 64 << 20


def main() -> None:
    def victim(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--pin-mib", type=int, help="be the process that is killed")

    with Findings.of_command(__doc__, victim) as found:
        if found.arguments.pin_mib is not None:
            _fill(found.arguments.pin_mib << 20)
            return
        rows = []
        for pin_mib in (0, 64 if found.quick else 8192):
            taken_mib, back_ms = _killed(found, pin_mib)
            found.figure(f"{pin_mib} MiB pinned", {"taken_mib": taken_mib, "back_ms": back_ms})
            rows.append((str(pin_mib), str(taken_mib), f"{back_ms:.0f}"))
        header = ("MiB pinned", "MiB of the device", "back after, ms")
        found.table(Section("A full device after kill -9", header, rows))


def _killed(found: Findings, pin_mib: int) -> tuple[int, float]:
    """What a victim took of the device, and when that was free again."""
    cuda = DriverCalls()
    before_bytes = cuda.free_bytes()
    command = [sys.executable, "-m", __spec__.name, "--pin-mib", str(pin_mib)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        try:
            assert victim.stdout is not None
            is_full = victim.stdout.readline() == "full\n"
            taken_bytes = before_bytes - cuda.free_bytes()
        finally:
            victim.kill()
            begun = time.monotonic()
    while True:
        took_s = time.monotonic() - begun
        left_bytes = before_bytes - cuda.free_bytes()
        if left_bytes <= OTHERS_BYTES or took_s > PATIENCE_S:
            break
        time.sleep(0.001)
    found.check(f"the device was full, with {pin_mib} MiB pinned", is_full)
    found.check(
        f"all of it is back, with {pin_mib} MiB pinned",
        left_bytes <= OTHERS_BYTES,
        f"{left_bytes >> 20} MiB are missing after {took_s:.1f} s",
    )
    return taken_bytes >> 20, took_s * 1000


def _fill(pin_bytes: int) -> None:
    """Take the device but for a rest, pin memory of the host, and wait to be killed."""
    driver = _vmm.CudaDriver("cuda")
    driver.use_streams([])
    address = driver.reserve(PAGE_BYTES)
    driver.map(address, PAGE_BYTES, driver.create(PAGE_BYTES))
    driver.set_access(address, PAGE_BYTES)
    try:
        while driver.free_bytes > LEFT_BYTES:
            driver.create(PAGE_BYTES)
    except OutOfMemoryError:
        pass  # others have taken the rest
    # Its staging stays pinned as long as it lives.
    whole = (address, BLOCK_BYTES, BLOCK_BYTES, 1, BLOCK_BYTES)
    blocks = _vmm.EngineBlocks(driver, [whole], PAGE_BYTES // BLOCK_BYTES)
    if pin_bytes:
        blocks.copy_out([0], _vmm.Staging(pin_bytes // BLOCK_BYTES, BLOCK_BYTES), [0])
    print("full", flush=True)
    time.sleep(PATIENCE_S)


if __name__ == "__main__":
    main()
