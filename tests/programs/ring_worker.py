"""A worker process for tests of the ring: `ring_worker.py SEGMENT PAGES`; ends when stdin does.

Lines on stdin: `held` prints the bytes held, `fail N` makes the N-th driver call from now fail.
"""

from __future__ import annotations

import sys

from kvelastic import _vmm, segment


def main(name: str, pages: int) -> None:
    attached = segment.open_writable(name)
    driver = _vmm.FaultDriver(_vmm.HostDriver())
    geometry = _vmm.Geometry(
        pages=pages, extent_bytes=2 << 20, block_bytes=256 << 10, blocks_per_page=8
    )
    memory = _vmm.Range.reserve(driver, geometry)
    worker = _vmm.RingWorker.start(attached.record, memory)
    print("serving", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "held":
            print(memory.held_bytes, flush=True)
        elif command == "fail":
            driver.arm(int(arguments[0]))
            print("armed", flush=True)
    worker.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
