"""Conditions of the machine for a run: unchanged, busy, or with one core.

with busy(workspace.folder): ...     # eight loops and a disk writer compete with the run
with one_core(): ...                 # this process and its children have one core
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from kvelastic.host_capacity import machine_memory_bytes

LOOPS = 8
MEMORY_NEEDED_BYTES = 8 << 30
"""Maximum memory of the tests with two lanes."""

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


def available_memory_bytes() -> int:
    return min(psutil.virtual_memory().available, machine_memory_bytes())
