"""Two processes and a page between them: `exchange.py give|take SOCKET` (see test_exchange.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from battery import Contents

from kvelastic import _vmm
from kvelastic.page_exchange import PageServer, receive_pages

PAGES = 250  # two messages


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
        with PageServer(path) as server:
            print("listening", flush=True)
            taker = server.send(driver, handles)
        print(taker, flush=True)
        sys.stdin.readline()
        print(contents.read(address, 1)[0], flush=True)
    else:
        handles = receive_pages(path, driver)
        use(handles)
        seen = [contents.read(address + i * granule, 8) for i in range(PAGES)]
        assert seen == [bytes([i % 251 + 1]) * 8 for i in range(PAGES)]
        contents.write(address, bytes([99]))
        print("the same pages", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
