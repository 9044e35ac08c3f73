"""Who holds what over time: a thread that looks at the ledgers, and at what the kernel says.

with MemoryWatch(servers) as watch:
    ...
    watch.samples          # all so far, in the order of time
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

import psutil
from vllm_server import worker_memory_bytes

from benchmarks.two_models.servers import WAYS, Servers, instance_name, ledger_name
from benchmarks.two_models.workload import MODELS
from kvelastic.instance.reading import ledgers, look_at_all
from kvelastic.instance.status import member_uses

EVERY_S = 0.5


@dataclass(frozen=True)
class Sample:
    at_s: float
    way: str
    model: str
    granted_bytes: int
    in_use_bytes: int
    cached_bytes: int
    parked_bytes: int
    ask_bytes: int
    """What it lacks, and waits for."""
    ask_s: float
    kernel_bytes: int
    """Of the worker's KV cache, by the kernel's account."""


class MemoryWatch:
    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._owners = {instance_name(way, m): (way, m) for way in WAYS for m in MODELS}
        self._workers = {
            (way, m): servers[way, m].processes()["worker"] for way in WAYS for m in MODELS
        }
        self._begin_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def now_s(self) -> float:
        """The samples' clock."""
        return time.monotonic() - self._begin_s

    def look(self) -> dict[tuple[str, str], Sample]:
        """The present state of every instance, by way and model."""
        at_s = round(self.now_s(), 2)
        mine = ledger_name()
        found = {}
        infos = ledgers()
        statuses = look_at_all(infos)
        for info in infos:
            if not info.group.startswith(mine):
                continue
            for member, use in member_uses(info, statuses):
                owner = self._owners.get(member.name)
                if owner is None:
                    continue
                found[owner] = Sample(
                    at_s,
                    *owner,
                    member.granted_bytes,
                    use.in_use_bytes,
                    use.cached_bytes,
                    use.parked_bytes,
                    member.ask_bytes,
                    round(member.ask_s, 3),
                    self._kernel_bytes(owner),
                )
        return found

    def _kernel_bytes(self, owner: tuple[str, str]) -> int:
        try:
            return worker_memory_bytes(self._workers[owner])
        except (AssertionError, OSError, psutil.Error):
            return 0  # it has ended; whoever asks it for something says so

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self.samples += self.look().values()


def most_held_bytes(samples: Iterable[Sample], way: str) -> tuple[int, int]:
    """The largest sum over both models at one look: granted, and by the kernel."""
    granted: dict[float, int] = {}
    kernel: dict[float, int] = {}
    for sample in samples:
        if sample.way == way:
            granted[sample.at_s] = granted.get(sample.at_s, 0) + sample.granted_bytes
            kernel[sample.at_s] = kernel.get(sample.at_s, 0) + sample.kernel_bytes
    return max(granted.values(), default=0), max(kernel.values(), default=0)


def most_used_bytes(samples: Iterable[Sample], way: str) -> int:
    """The most that requests of one model had in use at one look."""
    return max((sample.in_use_bytes for sample in samples if sample.way == way), default=0)
