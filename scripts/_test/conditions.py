"""Conditions of a run: the machine is busy, or has one core, or threads start late.

with busy(workspace.folder): ...     # eight loops and a disk writer compete with the run
with one_core(): ...                 # this process and its children have one core
with late_threads(): ...             # in new processes, threads of Python start late

others = OtherPrograms()             # what other programs take of the processors from here on
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import psutil

from kvelastic.device.host_memory import machine_memory_bytes

LOOPS = 8
MEMORY_NEEDED_BYTES = 8 << 30
"""Maximum memory of the tests with two lanes."""
DISK_NEEDED_BYTES = 6 << 30
"""Above the size of all temporary files of the default tier."""
QUIET_SHARE = 0.1
"""Of the processors: if others use more, how long a test takes says little about the test."""

_WRITER = """
import os, sys
block = os.urandom(4 << 20)
while True:
    with open(sys.argv[1], "wb", buffering=0) as file:
        for _ in range(128):
            file.write(block)
            os.fsync(file.fileno())
"""


@contextmanager
def busy(folder: Path) -> Iterator[None]:
    commands = [["sh", "-c", "while :; do :; done"]] * LOOPS
    commands.append([sys.executable, "-c", _WRITER, str(folder / "written")])
    with ExitStack() as ends:
        for command in commands:
            process = subprocess.Popen(command)
            ends.callback(process.wait)
            ends.callback(process.kill)
        yield


@contextmanager
def one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def late_threads() -> Iterator[None]:
    folder = Path(__file__).parent / "late_threads"
    with mock.patch.dict(os.environ, PYTHONPATH=str(folder)):
        yield


class CpuTimes(NamedTuple):
    """Seconds since the machine started, over the processors that this process may use."""

    all_s: float
    busy_s: float
    own_s: float
    """Of this process and its reaped descendants."""

    @classmethod
    def now(cls) -> CpuTimes:
        cores = os.sched_getaffinity(0)
        all_s = idle_s = 0.0
        for number, times in enumerate(psutil.cpu_times(percpu=True)):
            if number in cores:
                # The time of guests is in that of users, too.
                all_s += sum(times) - times.guest - times.guest_nice
                idle_s += times.idle + times.iowait
        used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(each.ru_utime + each.ru_stime for each in used)
        return cls(all_s, all_s - idle_s, own_s)


class OtherPrograms:
    """Measures the CPU time that others use from now on.

    Others are all processes but this one and those of its descendants that have been reaped.
    """

    def __init__(self) -> None:
        self._before = CpuTimes.now()

    def share(self) -> float:
        """The part of the processors that they had, from 0 to 1."""
        now = CpuTimes.now()
        all_s = now.all_s - self._before.all_s
        others_s = now.busy_s - self._before.busy_s - (now.own_s - self._before.own_s)
        return max(0.0, others_s / all_s) if all_s > 0 else 0.0


def available_memory_bytes() -> int:
    return min(psutil.virtual_memory().available, machine_memory_bytes())
