"""A scheduler (this process) and some worker processes, with every channel between them.

with Library.make() as library, Group(library, ranks=4) as group:
    group.ring_us(1000, pause_us=0)
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ring import pickled
from benchmarks.ring.channels import Library, SharedWords, streams_us
from benchmarks.ring.geometry import LAYOUT, PAGE_BYTES, PAGES
from kvelastic import _vmm
from kvelastic.pool.pool import native_geometry
from kvelastic.shared import segment

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Spent:
    """What the threads of all the processes have used so far."""

    cpu_us: float
    switches: int

    def since(self, before: Spent) -> Spent:
        return Spent(self.cpu_us - before.cpu_us, self.switches - before.switches)


def each_us(call: Callable[[], object], count: int, pause_us: int = 0) -> list[float]:
    """Microseconds of each call."""
    clock, samples = time.perf_counter_ns, []
    for _ in range(count):
        if pause_us:
            time.sleep(pause_us / 1e6)
        begin = clock()
        call()
        samples.append((clock() - begin) / 1000)
    return samples


class Group:
    """The ring and its workers, a socket, a pipe and a listener to each of them."""

    def __init__(self, library: Library, ranks: int) -> None:
        self.ranks = ranks
        self._library = library
        self._stack = ExitStack()
        try:
            self._make()
        except BaseException:
            self._stack.close()
            raise

    def _make(self) -> None:
        keep = self._stack.enter_context
        name = f"bench-ring-{os.getpid()}-{self.ranks}"
        own = keep(segment.create(name, engine="bench", device="host"))
        geometry = native_geometry(LAYOUT, PAGES)
        self.ring = _vmm.Ring.create(own.control_block, geometry, TIMEOUT_S, self.ranks)
        total = PAGES * PAGE_BYTES
        self.pool = _vmm.Pool(
            self.ring,
            max_blocks=PAGES,
            limit_bytes=total,
            capacity_bytes=total,
            preallocate=False,
        )
        self._words = SharedWords.make(self._library)
        self._stack.callback(os.close, self._words.fd)
        folder = Path(keep(tempfile.TemporaryDirectory(prefix="kvelastic-bench-ring-")))
        self._sockets: list[socket.socket] = []
        self._pipes: list[tuple[int, int]] = []
        self._connections: list[socket.socket] = []
        self._paths: list[str] = []
        self._processes = [self._start(own.name, folder, rank) for rank in range(self.ranks)]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready", "a worker has not started"
        self.ring.wait_for_workers(TIMEOUT_S)
        self.pool.ensure(1)

    def _start(self, name: str, folder: Path, rank: int) -> subprocess.Popen[str]:
        own, its = socket.socketpair()
        own_pickled, its_pickled = socket.socketpair()
        to_own, from_it = os.pipe()
        to_it, from_own = os.pipe()
        listener = socket.socket(socket.AF_UNIX)
        path = str(folder / f"w{rank}.sock")
        listener.bind(path)
        listener.listen()
        for mine in (own, own_pickled):
            self._stack.enter_context(closing(mine))
        for fd in (to_own, from_own):
            self._stack.callback(os.close, fd)
        self._sockets.append(own)
        self._connections.append(own_pickled)
        self._pipes.append((to_own, from_own))
        self._paths.append(path)
        told = {
            "library": self._library.path,
            "segment": name,
            "rank": rank,
            "words": self._words.fd,
            "socket": its.fileno(),
            "pipe": [to_it, from_it],
            "connection": its_pickled.fileno(),
            "listener": listener.fileno(),
        }
        inherited = [its.fileno(), its_pickled.fileno(), listener.fileno(), self._words.fd]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ring.worker", json.dumps(told)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[*inherited, to_it, from_it],
        )
        self._stack.callback(self._end, process)
        for theirs in (its, its_pickled, listener):
            theirs.close()
        for fd in (to_it, from_it):
            os.close(fd)
        return process

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    # --- one sample a round, in microseconds

    def ring_us(self, count: int, pause_us: int = 0) -> list[float]:
        """A command that asks for nothing but an answer."""
        return each_us(self.ring.ping, count, pause_us)

    def bells_us(self, count: int, pause_us: int = 0) -> list[float]:
        return self._words.bells_us(self.ranks, count, pause_us)

    def sockets_us(self, count: int, pause_us: int = 0, *, at_once: bool = True) -> list[float]:
        fds = [each.fileno() for each in self._sockets]
        return streams_us(self._library, fds, fds, at_once=at_once, count=count, pause_us=pause_us)

    def sockets_in_turn_us(self, count: int, pause_us: int = 0) -> list[float]:
        return self.sockets_us(count, pause_us, at_once=False)

    def pipes_us(self, count: int, pause_us: int = 0) -> list[float]:
        ins, outs = zip(*self._pipes, strict=True)
        return streams_us(self._library, ins, outs, at_once=True, count=count, pause_us=pause_us)

    def pickled_us(self, count: int, pause_us: int = 0) -> list[float]:
        return each_us(lambda: pickled.ask_open(self._connections), count, pause_us)

    def as_kvcached_us(self, count: int, pause_us: int = 0) -> list[float]:
        return each_us(lambda: pickled.ask_as_kvcached(self._paths), count, pause_us)

    def own_page_us(self) -> tuple[float, float]:
        """The driver's calls alone, in all ranks at once: a map, then an unmap, then a map...

        Without and with the bare futexes that ask for them.
        """
        return self._words.page_us(self.ranks)

    # --- what they use

    def spent(self) -> Spent:
        """Of this process and its workers, all threads."""
        cpu_ns = switches = 0
        for pid in [os.getpid(), *(process.pid for process in self._processes)]:
            for task in Path(f"/proc/{pid}/task").iterdir():
                cpu_ns += int((task / "schedstat").read_text().split()[0])
                for line in (task / "status").read_text().splitlines():
                    if "ctxt_switches" in line:
                        switches += int(line.split()[1])
        return Spent(cpu_ns / 1000, switches)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
