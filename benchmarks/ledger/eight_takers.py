"""Eight processes at one ledger: how fast, how evenly, and whether a page is ever two's."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.harness import Figure
from benchmarks.ledger.baseline import Baseline
from benchmarks.ledger.own_device import OwnDevice
from benchmarks.ledger.taker import MOST_GRANTS, MOST_PAGES, PAGE_BYTES, Done, Order, Taker

TAKERS = 8
SCARCE_PAGES = TAKERS * MOST_PAGES * MOST_GRANTS // 2
"""Of the checked rounds: half of what all could hold."""
LOOK_EVERY_S = 0.001
BEGIN_AFTER_S = 0.02
SOON_S = 60.0
"""How long a busy machine may keep a process from answering."""
SAME_LOOKS = 5
"""A look is no snapshot: a page that moves may be counted twice. One that two have stays so."""


@dataclass(frozen=True)
class Size:
    """Rounds, and seconds of each."""

    checked_rounds: int
    checked_s: float
    native_rounds: int
    native_s: float


FULL = Size(checked_rounds=60, checked_s=1.0, native_rounds=9, native_s=0.5)
QUICK = Size(checked_rounds=10, checked_s=0.5, native_rounds=3, native_s=0.3)


@dataclass
class Watcher:
    """Looks at the ledger as anybody may, while all run and when all stand still."""

    device: OwnDevice
    looks: int = 0
    rest_looks: int = 0
    most_pages: int = 0
    """In one look; two's pages or not, see `SAME_LOOKS`."""
    wrong: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        """In motion."""
        capacity = self.device.capacity_bytes
        granted = self.device.granted()
        self.looks += 1
        total = sum(granted.values())
        if any(one % PAGE_BYTES or one > capacity for one in granted.values()):
            self.wrong.append(f"no whole pages: {granted}")
        if total > capacity and all(self.device.granted() == granted for _ in range(SAME_LOOKS)):
            self.wrong.append(f"beyond capacity: {granted}")
        if total <= capacity:
            self.most_pages = max(self.most_pages, total // PAGE_BYTES)

    def look_at_rest(self, done: list[Done], total_pages: int) -> None:
        """All stand still, so three counts of the same pages must agree."""
        self.rest_looks += 1
        seen = self.device.granted()
        said = {f"taker-{i}": one.held_pages * PAGE_BYTES for i, one in enumerate(done)}
        if {name: seen[name] for name in said} != said:
            self.wrong.append(f"granted {seen}, held {said}")
        if sum(seen.values()) != total_pages * PAGE_BYTES:
            self.wrong.append(f"granted {seen}, but the total is {total_pages} pages")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Looks all the time."""
        self._stop.clear()
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.look()


class Takers:
    """Some processes with a taker each; they begin every round together."""

    def __init__(self, count: int, device: OwnDevice, baseline: Baseline) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for number in range(count):
            mine, theirs = spawn.Pipe()
            pages = device.capacity_bytes // PAGE_BYTES
            taker = Taker(device.group, pages, f"taker-{number}", baseline.place)
            process = spawn.Process(target=taker.serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        for pipe in self.pipes:
            assert self._answer(pipe, SOON_S) == "ready"

    def round(self, how: str, seconds: float) -> list[Done]:
        """What each one did."""
        order = Order(how, time.monotonic() + BEGIN_AFTER_S, seconds)
        for pipe in self.pipes:
            pipe.send(order)
        return [self._answer(pipe, seconds + SOON_S) for pipe in self.pipes]

    def _answer(self, pipe: Connection, timeout_s: float) -> Any:
        if not pipe.poll(timeout_s):
            raise TimeoutError("a taker does not answer")
        return pipe.recv()

    def __enter__(self) -> Takers:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(Order("end", 0))
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


def rate(done: list[Done]) -> float:
    """Operations a second of all together, in thousands."""
    return sum(one.operations for one in done) / max(one.seconds for one in done) / 1000


def native_statistics(size: Size, baseline: Baseline) -> list[Figure]:
    """Room for all: nothing but the ledger's own steps, and the mutex's, in turns."""
    row = Figure("8 at once, native loops: grants and returns", "k/s", [], "", "sum under a mutex")
    alone = Figure("1 alone, native loop", "k/s", [], "", "sum under a mutex")
    with OwnDevice(1024 * PAGE_BYTES, "native") as device:
        device.join("watcher")
        with Takers(TAKERS, device, baseline) as eight:
            for _ in range(size.native_rounds):
                row.floor_samples.append(rate(eight.round("mutex", size.native_s)))
                row.samples.append(rate(eight.round("ledger", size.native_s)))
        with Takers(1, device, baseline) as one:
            for _ in range(size.native_rounds):
                alone.floor_samples.append(rate(one.round("mutex", size.native_s / 2)))
                alone.samples.append(rate(one.round("ledger", size.native_s / 2)))
    return [row, alone]


def checked_figures(size: Size, baseline: Baseline) -> list[Figure]:
    """Room for half of what all want; every step is checked."""
    rounds: list[list[Done]] = []
    with OwnDevice(SCARCE_PAGES * PAGE_BYTES, "takers") as device:
        device.join("watcher")
        watcher = Watcher(device)
        with Takers(1, device, baseline) as one:
            alone = [rate(one.round("checked", size.checked_s)) for _ in range(5)]
        with Takers(TAKERS, device, baseline) as eight:
            for _ in range(size.checked_rounds):
                with watcher.watching():
                    rounds.append(eight.round("checked", size.checked_s))
                watcher.look_at_rest(rounds[-1], baseline.add_to_total(0))
        left = sum(device.granted().values())
    if watcher.wrong:
        raise AssertionError(f"{len(watcher.wrong)} wrong looks: {watcher.wrong[:3]}")
    if left:
        raise AssertionError(f"{left} bytes are still granted when all have left")
    return _checked_rows(rounds, alone, watcher)


def _checked_rows(rounds: list[list[Done]], alone: list[float], watcher: Watcher) -> list[Figure]:
    by_taker = list(zip(*rounds, strict=True))
    operations = [sum(done.operations for done in taker) for taker in by_taker]
    refused = sum(done.refused for one in rounds for done in one)
    everything = sum(operations)
    total = Figure("8 at once, checked from Python", "k/s", [rate(done) for done in rounds])
    total.floor_name, total.floor_samples = "1 alone, checked", alone
    total.note = f"{everything:,} operations, {refused:,} grants refused while all was taken"
    mean = everything / TAKERS
    each = Figure("  of one process, of the mean of all", "%", [100 * n / mean for n in operations])
    each.bar = "none starves"
    each.note = f"least {min(operations):,}, most {max(operations):,} operations"
    gaps = [1000 * max(done.longest_without_s for done in taker) for taker in by_taker]
    longest = Figure("  longest time without a page, of each", "ms", gaps, "none starves")
    cpu_gaps = [1000 * max(done.longest_refused_cpu_s for done in taker) for taker in by_taker]
    refusals = Figure("  of its processor time, of each", "ms", cpu_gaps)
    most = [100 * max(done.most_total_pages for done in one) / SCARCE_PAGES for one in rounds]
    held = Figure("  most held at once, of the capacity", "%", most, "<= 100 %")
    held.note = (
        f"a total of all, read at every grant; {watcher.looks:,} looks of a watcher while they ran"
        f" (most {watcher.most_pages} of {SCARCE_PAGES} pages), {watcher.rest_looks} while all"
        " stood still: bytes granted = bytes held, member by member, every time"
    )
    return [total, each, longest, refusals, held]


def figures(size: Size) -> list[Figure]:
    """Of the native loops and of the checked rounds."""
    with Baseline.make() as baseline:
        return [*native_statistics(size, baseline), *checked_figures(size, baseline)]
