"""Two processes and a page between them: `exchange.py give|take SOCKET` (see test_exchange.py)."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

from battery import Contents

from kvelastic import _vmm

PAGES = 250
MOST = 200  # the kernel takes 253 descriptors at once


def give(path: Path, driver: _vmm.CudaDriver, handles: list[int]) -> int:
    """The pages go to one process, whose pid is returned."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen(1)
        print("listening", flush=True)
        taker, _ = listening.accept()
    with taker:
        for first in range(0, PAGES, MOST):
            descriptors = [driver.export_page(one) for one in handles[first : first + MOST]]
            socket.send_fds(taker, [b"pages"], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        peer = taker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", peer)[0])


def take(path: Path, driver: _vmm.CudaDriver) -> list[int]:
    handles: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as giver:
        giver.connect(str(path))
        while len(handles) < PAGES:
            _, descriptors, _, _ = socket.recv_fds(giver, 8, MOST)
            handles += map(driver.import_page, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    return handles


def main(role: str, path: Path) -> None:
    driver = _vmm.CudaDriver("cuda")
    contents = Contents(driver)
    granule = driver.granularity_bytes
    address = driver.reserve(PAGES * granule)

    def use(handles: list[int]) -> None:
        for i, handle in enumerate(handles):
            driver.map(address + i * granule, granule, handle)
        driver.set_access(address, PAGES * granule)

    if role == "give":
        handles = [driver.create(granule) for _ in range(PAGES)]
        use(handles)
        for i in range(PAGES):
            contents.write(address + i * granule, bytes([i % 251 + 1]) * 8)
        print(give(path, driver, handles), flush=True)
        sys.stdin.readline()
        print(contents.read(address, 1)[0], flush=True)
    else:
        handles = take(path, driver)
        use(handles)
        seen = [contents.read(address + i * granule, 8) for i in range(PAGES)]
        assert seen == [bytes([i % 251 + 1]) * 8 for i in range(PAGES)]
        contents.write(address, bytes([99]))
        print("the same pages", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
