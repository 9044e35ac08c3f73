"""Released memory is free again, and how soon cuMemGetInfo says so."""

from __future__ import annotations

import time

from benchmarks.gpu.driver_calls import DriverCalls
from benchmarks.gpu.findings import Findings

MIB = 1 << 20
PATIENCE_S = 5.0
OTHERS_BYTES = 64 * MIB
"""What others may take or give meanwhile."""


def main() -> None:
    with Findings.of_command(__doc__) as found:
        cuda = DriverCalls()
        for size_mib in (2, 64):
            size_bytes = size_mib * MIB
            count = (64 if found.quick else 1024) * MIB // size_bytes
            before = cuda.free_bytes()
            address = cuda.reserve(count * size_bytes)
            handles = [cuda.create(size_bytes) for _ in range(count)]
            for i, handle in enumerate(handles):
                cuda.map(address + i * size_bytes, size_bytes, handle)
            cuda.set_access(address, count * size_bytes)
            held = before - cuda.free_bytes()
            cuda.unmap(address, count * size_bytes)
            unmapped = before - cuda.free_bytes()
            for handle in handles:
                cuda.destroy(handle, size_bytes)
            begun = time.monotonic()
            soon = before - cuda.free_bytes()
            while before - cuda.free_bytes() > 0 and time.monotonic() - begun < PATIENCE_S:
                time.sleep(0.001)
            took_ms = (time.monotonic() - begun) * 1000
            left = before - cuda.free_bytes()
            cuda.release(address, count * size_bytes)
            found.line(
                f"{count} pages of {size_mib} MiB: free memory falls by {held / MIB:.0f} MiB; by"
                f" {unmapped / MIB:.0f} when unmapped, {soon / MIB:.0f} at once after the release,"
                f" {left / MIB:.0f} after {took_ms:.1f} ms."
            )
            found.figure(f"held_bytes_{size_mib}", held)
            found.figure(f"left_bytes_{size_mib}", left)
            found.check(
                f"{size_mib} MiB: pages take what they hold",
                held >= count * size_bytes - OTHERS_BYTES,
            )
            found.check(
                f"{size_mib} MiB: all comes back",
                left <= OTHERS_BYTES // 4,
                f"{left} bytes are left",
            )


if __name__ == "__main__":
    main()
