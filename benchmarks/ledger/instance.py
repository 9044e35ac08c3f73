"""An instance that does as it is told: one JSON array a line in, one answer out.

with Instance(pages=66, page_mib=16, KVELASTIC_DEVICE="host") as one:
    answer = one.ask("alloc", 8)          # {"result": [1, 2, ...], "ms": ..., "cpu_ms": ...}
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvelastic.config import Config
    from kvelastic.pool.pool import ElasticPool

BLOCKS_PER_PAGE = 8
RETRY_S = 0.001
LOOK_EVERY_S = 0.0002
ROOT = Path(__file__).parents[2]


class Instance:
    """A process of its own with pool, maintenance thread, segment and a slot in a ledger."""

    def __init__(
        self,
        pages: int,
        page_mib: int,
        *,
        module: str = "benchmarks.ledger.instance",
        **environ: str,
    ) -> None:
        command = [sys.executable, "-m", module, str(pages), str(page_mib)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def send(self, *command: Any) -> None:
        """Does not wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """The next answer; the first one says that the instance is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the instance has ended: {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, *command: Any) -> dict[str, Any]:
        """A call of the native pool, timed in the instance."""
        self.send(*command)
        return self.read()

    def close(self) -> None:
        """Ends it in order; kills it where that does not help."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cpu_ms() -> float:
    """What all threads of this process have used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (used.ru_utime + used.ru_stime) * 1000


class Arrivals:
    """Looks, while an alloc waits, how many blocks could be had with no page to map.

    with Arrivals(blocks) as arrivals: ...
    arrivals.first_ms, arrivals.first_blocks    # of the first look that saw more than at the start
    """

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.first_ms: float | None = None
        self.first_blocks = 0

    def _look(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            more = self._blocks.available_mapped() - self._before
            if more > 0:
                self.first_ms = (time.perf_counter() - self.start_s) * 1000
                self.first_blocks = more
                return

    def __enter__(self) -> Arrivals:
        self._before = self._blocks.available_mapped()
        self.start_s = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def alloc_until(blocks: Any, count: int, timeout_s: float) -> dict[str, Any]:
    """As an engine does, which asks again in every step: the blocks, and how many times no.

    `first_ms` is None where the first page that came was all of it.
    """
    refused = 0
    end = time.monotonic() + timeout_s
    with Arrivals(blocks) as arrivals:
        while (ids := blocks.alloc(count)) is None and time.monotonic() < end:
            refused += 1
            time.sleep(RETRY_S)
        done_ms = (time.perf_counter() - arrivals.start_s) * 1000
    return {
        "ids": ids,
        "refused": refused,
        "done_ms": done_ms,
        "first_ms": arrivals.first_ms,
        "first_blocks": arrivals.first_blocks,
    }


Verbs = dict[str, Callable[..., Any]]


@contextmanager
def no_verbs(_: ElasticPool, __: Config) -> Iterator[Verbs]:
    """An instance that knows the calls of its pool only."""
    yield {}


def serve(
    pages: int,
    page_mib: int,
    more: Callable[[ElasticPool, Config], AbstractContextManager[Verbs]] = no_verbs,
) -> None:
    """Until stdin is closed. `more` answers verbs of its own, for as long as the pool serves."""
    from kvelastic.config import load
    from kvelastic.device.selection import resolve
    from kvelastic.pool.layout import PageLayout
    from kvelastic.pool.pool import local_range, open_pool

    settings = load()
    page_bytes = page_mib << 20
    layout = PageLayout(page_bytes // BLOCKS_PER_PAGE, 1, BLOCKS_PER_PAGE, page_bytes)
    device = resolve(settings.device, settings)
    if not device.is_host:
        device.driver().use_streams([])  # type: ignore[attr-defined]  # no kernel uses its pages
    with (
        open_pool(
            settings,
            layout,
            pages,
            num_blocks=pages * BLOCKS_PER_PAGE,
            block_tokens=16,
            engine="bench",
            devices=[device],
            memory=local_range(device),
        ) as pool,
        more(pool, settings) as added,
    ):
        pool.start_maintenance()
        verbs: Verbs = {
            "nothing": lambda: None,
            "alloc_until": functools.partial(alloc_until, pool.blocks),
            **added,
        }
        print(json.dumps({"name": pool.name}), flush=True)
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            start, before = time.perf_counter(), cpu_ms()
            result = (verbs.get(verb) or getattr(pool.blocks, verb))(*arguments)
            took = (time.perf_counter() - start) * 1000
            answer = {"result": result, "ms": took, "cpu_ms": cpu_ms() - before}
            print(json.dumps(answer | {"cpu_total_ms": cpu_ms()}), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
