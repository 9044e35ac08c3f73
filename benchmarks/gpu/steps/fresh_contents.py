"""What a new page holds: zeros, what this process wrote before, or what another process wrote."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu.driver_calls import DriverCalls
from benchmarks.gpu.findings import Findings

PAGE_BYTES = 2 << 20
MARK = 0x5A
WRITES = """
import sys
from benchmarks.gpu.steps.fresh_contents import mark_pages
mark_pages(int(sys.argv[1]))
"""


def main() -> None:
    with Findings.of_command(__doc__) as found:
        pages = 16 if found.quick else 512
        cuda = DriverCalls()
        seen = {"at first": _look(cuda, pages)}
        _mark(cuda, pages)
        seen["after pages of this process"] = _look(cuda, pages)
        subprocess.run([sys.executable, "-c", WRITES, str(pages)], check=True)
        seen["after pages of another process, which has ended"] = _look(cuda, pages)
        for when, told in seen.items():
            found.line(
                f"{pages} new pages of 2 MiB {when}: {told['zero']} all zeros, {told['marked']}"
                f" with what was written before, {told['other']} with something else."
            )
        found.figure("pages_by_contents", seen)
        found.check(
            "no new page shows what another process wrote",
            seen["after pages of another process, which has ended"]["marked"] == 0,
        )


def mark_pages(pages: int) -> None:
    """In a process of its own: writes all of its pages and ends with them."""
    _mark(DriverCalls(), pages)


def _map(cuda: DriverCalls, pages: int) -> tuple[int, list[int]]:
    address = cuda.reserve(pages * PAGE_BYTES)
    handles = [cuda.create(PAGE_BYTES) for _ in range(pages)]
    for i, handle in enumerate(handles):
        cuda.map(address + i * PAGE_BYTES, PAGE_BYTES, handle)
    cuda.set_access(address, pages * PAGE_BYTES)
    return address, handles


def _give_back(cuda: DriverCalls, address: int, handles: list[int]) -> None:
    cuda.unmap(address, len(handles) * PAGE_BYTES)
    for handle in handles:
        cuda.destroy(handle, PAGE_BYTES)
    cuda.release(address, len(handles) * PAGE_BYTES)


def _mark(cuda: DriverCalls, pages: int) -> None:
    address, handles = _map(cuda, pages)
    cuda.call("cuMemsetD8_v2", address, MARK, pages * PAGE_BYTES)
    cuda.error()
    _give_back(cuda, address, handles)


def _look(cuda: DriverCalls, pages: int) -> dict[str, int]:
    address, handles = _map(cuda, pages)
    told = {"zero": 0, "marked": 0, "other": 0}
    for i in range(pages):
        held = cuda.read(address + i * PAGE_BYTES, PAGE_BYTES)
        if held == bytes(PAGE_BYTES):
            told["zero"] += 1
        else:
            told["marked" if held[:1] == bytes([MARK]) == held[-1:] else "other"] += 1
    _give_back(cuda, address, handles)
    return told


if __name__ == "__main__":
    main()
