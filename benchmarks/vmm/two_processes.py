"""Part 4: recycled cycles of one page in two processes at once, against one process alone.

A driver that serves processes one after another shows twice the time, one that serves them side
by side shows once. Each of two workers waits for a word; a round is the first alone, both, the
second alone.
As a program this is such a worker.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.vmm import driver_kinds, page_cycle
from benchmarks.vmm.section import Section, median_p99, median_ratio

TITLE = "Two processes on one device"
FULL: dict[str, Any] = {"rounds": 25, "cycles": 300}
QUICK: dict[str, Any] = {"rounds": 3, "cycles": 20}


class Worker:
    """A process that goes through `cycles` recycled cycles whenever it is told to."""

    def __init__(self, kind: str, cycles: int, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.vmm.two_processes", kind, str(cycles)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1
        )
        self.result_us()  # one burst without being asked: the worker is warm and there

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")

    def result_us(self) -> float:
        """Waits for the end of its cycles; microseconds of the median one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the worker has died; what it said is above"
        return float(line)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def measure(kind: str, *, rounds: int, cycles: int) -> dict[str, Any]:
    """Microseconds of a cycle, a sample a round over both workers: `alone_us`, `together_us`."""
    with tempfile.TemporaryDirectory(prefix="kvelastic_bench_", dir="/dev/shm") as folder:
        # The file that is the simulated machine, which both share; others do not look at it.
        environment = os.environ | {"KVSIM_MACHINE": str(Path(folder) / "machine")}
        workers = [Worker(kind, cycles, environment) for _ in range(2)]
        try:
            alone_us, together_us = [], []
            for _ in range(rounds):
                first = _burst_us(workers[:1])
                both = _burst_us(workers)
                second = _burst_us(workers[1:])
                alone_us.append(statistics.mean(first + second))
                together_us.append(statistics.mean(both))
        finally:
            for worker in workers:
                worker.stop()
    return {"alone_us": alone_us, "together_us": together_us, "cores": os.cpu_count()}


def _burst_us(workers: list[Worker]) -> list[float]:
    for worker in workers:
        worker.go()
    return [worker.result_us() for worker in workers]


def sections(data: dict[str, Any], kind: driver_kinds.DriverKind) -> list[Section]:
    alone, together = data["alone_us"], data["together_us"]
    rows = [
        ("one alone", median_p99(alone), "1.00"),
        ("two at once, each", median_p99(together), f"{median_ratio(together, alone):.2f}"),
    ]
    notes = [f"1 = side by side, 2 = one after another. This machine has {data['cores']} cores."]
    if kind.name == driver_kinds.SIMULATED:
        notes.append(
            "In the simulator calls of one process wait for each other, those of two processes do"
            " not, and its delays keep a core busy: a real driver may well answer something else."
        )
    if kind.name == driver_kinds.HOST:
        notes.append("Each process has a memfd of its own: what they share is the kernel.")
    return [Section(f"{TITLE}: a recycled cycle", ("", "us, median (p99)", "ratio"), rows, notes)]


def work(kind: str, cycles: int) -> None:
    """Answers every line of stdin with the microseconds of a cycle; a first one without a line."""
    recycled = page_cycle.cycles_of(kind)["recycled"]
    while True:
        took_us = []
        for _ in range(cycles):
            start = time.perf_counter_ns()
            recycled()
            took_us.append((time.perf_counter_ns() - start) / 1000)
        # The median: a third program on two cores interrupts some cycles, a lock meets them all.
        print(statistics.median(took_us), flush=True)
        if not sys.stdin.readline():
            return


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
