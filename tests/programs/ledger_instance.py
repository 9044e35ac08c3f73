"""A real instance over host memory, driven by commands: pool, segment, ledger, maintenance.

As a program it reads commands from stdin, one JSON array a line, and answers each with a JSON line:
`["alloc", 8]`, `["free", [1, 2]]`, `["cache", [3]]`, `["stats"]`, ... As a module, for tests:

    with Instance(KVELASTIC_HOST_MEMORY="64M") as a, Instance(KVELASTIC_HOST_MEMORY="64M") as b:
        ids = a.alloc(8); a.cache(ids); b.alloc(16)
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

from processes import LineProgram

PAGE_BYTES = 2 << 20
BLOCKS_PER_PAGE = 4
PAGES = 4096
LEAST_ALLOCS = 8


class Instance(LineProgram):
    """An instance in a process of its own, under the control of a test."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        super().__init__(__file__, *arguments, environment=environ)
        ready = self.read()
        if "error" in ready:
            self.finish()
            raise RuntimeError(ready["error"])
        self.name: str = ready["name"]

    def send(self, *command: Any) -> None:
        super().send(json.dumps(command))

    def read(self) -> Any:
        return json.loads(super().read())

    def ask(self, *command: Any) -> Any:
        self.send(*command)
        return self.read()

    def alloc(self, count: int) -> list[int] | None:
        ids: list[int] | None = self.ask("alloc", count)
        return ids

    def free(self, ids: list[int]) -> None:
        self.ask("free", ids)

    def cache(self, ids: list[int]) -> None:
        self.ask("cache", ids)

    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = self.ask("stats")
        return stats

    @property
    def mapped_bytes(self) -> int:
        return self.stats()["pages_mapped"] * PAGE_BYTES

    def close(self) -> None:
        self.finish()

    def __exit__(self, *_: object) -> None:
        self.close()


def serve() -> None:
    from kvelastic import _vmm
    from kvelastic.config import configure_logging, load
    from kvelastic.device.selection import HOST, reserve_range, resolve
    from kvelastic.errors import KvelasticError
    from kvelastic.pool.layout import PageLayout
    from kvelastic.pool.pool import open_pool

    def answer(value: object) -> None:
        print(json.dumps(value), flush=True)

    settings = load()
    configure_logging(settings)
    pages = int(sys.argv[1]) if len(sys.argv) > 1 else PAGES
    layout = PageLayout(PAGE_BYTES // BLOCKS_PER_PAGE, 1, BLOCKS_PER_PAGE, PAGE_BYTES)
    device = resolve(os.environ.get("KVELASTIC_DEVICE", HOST), settings)
    driver = device.driver()
    if isinstance(driver, _vmm.CudaDriver):
        driver.use_streams([])  # no kernel uses the pages
    try:
        pool = open_pool(
            settings,
            layout,
            pages,
            num_blocks=pages * BLOCKS_PER_PAGE,
            block_tokens=16,
            engine="test",
            devices=[device],
            memory=lambda _, geometry: reserve_range(driver, geometry, guard_pages=False),
            reserve_bytes=settings.reserve or 0,
        )
    except KvelasticError as error:
        answer({"error": f"{error.code}: {error}"})
        return
    with pool:
        pool.start_maintenance()
        answer({"name": pool.name})
        blocks = pool.blocks
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            if verb == "churn":
                answer(churn(blocks, *arguments))
            elif verb == "fork_and_pause":
                child = os.fork()
                while child == 0:
                    signal.pause()
                answer(child)
            elif verb == "granted":
                answer(pool.device_set.granted_bytes)
            elif verb == "availability_epoch":
                answer(blocks.availability_epoch)
            elif verb == "engine_sleeps":
                pool.segment.control_block.set_engine_asleep(*arguments)
                answer(None)
            elif verb == "drop_memory":
                # As a dying process's, on a simulated GPU: its locks are still held.
                ctypes.CDLL("libcuda.so.1").kvsim_drop_memory()
                answer(None)
            elif verb == "available":
                answer(blocks.available_size())
            else:
                answer(getattr(blocks, verb)(*arguments))
        blocks.check_integrity()


def churn(blocks: Any, seconds: float, most: int) -> dict[str, int]:
    """Allocs and frees as fast as it can; every alloc and every None is counted.

    On a slow machine it goes on until it has made some allocs.
    """
    import random

    dice = random.Random(os.getpid())
    held: list[list[int]] = []
    counts = {"got": 0, "none": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end or counts["got"] + counts["none"] < LEAST_ALLOCS:
        if held and (len(held) > 8 or dice.random() < 0.45):
            ids = held.pop(dice.randrange(len(held)))
            (blocks.cache if dice.random() < 0.5 else blocks.free)(ids)
            continue
        ids = blocks.alloc(dice.randint(1, most))
        counts["none" if ids is None else "got"] += 1
        if ids is not None:
            held.append(ids)
        blocks.take_changes()
    for ids in held:
        blocks.free(ids)
    blocks.check_integrity()
    return counts


if __name__ == "__main__":
    serve()
