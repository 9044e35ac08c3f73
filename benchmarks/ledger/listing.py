"""`kvctl list` as a whole process, with 20 instances to look at."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Figure
from benchmarks.ledger.instance import Instance
from benchmarks.ledger.own_device import OwnDevice

INSTANCES = 20
PAGES, PAGE_MIB = 4, 2


@dataclass(frozen=True)
class Size:
    """How many processes of each kind."""

    rounds: int


FULL = Size(rounds=25)
QUICK = Size(rounds=5)

KVCTL = str(Path(sysconfig.get_path("scripts")) / "kvctl")
BARE = (sys.executable, "-c", "pass")
CLICK = (sys.executable, "-c", "import click")
ENVIRON: dict[str, str] = {}
"""Of the processes that are timed; `bytecode` fills it."""


def process_ms(*command: str) -> tuple[float, float]:
    """Wall time of a process, from its start until it has been waited for; its processor time."""
    start, before = time.perf_counter(), children_cpu_ms()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRON)
    return (time.perf_counter() - start) * 1000, children_cpu_ms() - before


@contextmanager
def bytecode() -> Iterator[None]:
    """As where kvelastic is installed: modules are compiled once, and not in each process.

    `scripts/bench` forbids bytecode in the tree, so it lies in a folder that goes away.
    """
    with TemporaryDirectory(prefix="kvelastic-bench-pyc-") as folder:
        ENVIRON.clear()
        ENVIRON.update(os.environ | {"PYTHONPYCACHEPREFIX": folder})
        ENVIRON.pop("PYTHONDONTWRITEBYTECODE", None)
        for command in (BARE, CLICK, (KVCTL, "list"), (KVCTL, "list", "--json")):
            process_ms(*command)
        yield


def children_cpu_ms() -> float:
    """Of all processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1000


def listed() -> int:
    """How many instances kvctl sees; also of others on this machine."""
    command = [KVCTL, "list", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.count('"pid"')


def figures(size: Size) -> list[Figure]:
    """The list as people read it and as programs do, in turns with bare Python."""
    with bytecode():
        return _measure(size)


def _measure(size: Size) -> list[Figure]:
    table = Figure(f"kvctl list, {INSTANCES} instances", "ms", [], "<= 150 ms", "python -c pass")
    beside = Figure("  the same", "ms", table.samples, "", "python -c 'import click'")
    listing = Figure("kvctl list --json", "ms", [], "", "python -c pass")
    cpu = Figure("  its processor time", "ms", [], "", "that of import click")
    empty = Figure("  its processor time with none of the 20", "ms", [])
    empty.samples = [process_ms(KVCTL, "list")[1] for _ in range(size.rounds)]
    with OwnDevice(INSTANCES * PAGES * (PAGE_MIB << 20), "list") as device, ExitStack() as stack:
        environ = device.settings | {"KVELASTIC_PAGE_PREALLOC_ENABLED": "false"}
        every = [
            stack.enter_context(Instance(PAGES, PAGE_MIB, **environ)) for _ in range(INSTANCES)
        ]
        for one in every:
            one.read()
            one.ask("alloc", 8)
        seen = listed()
        assert seen >= INSTANCES, f"kvctl lists {seen} instances only"
        for _ in range(size.rounds):
            bare, _ = process_ms(*BARE)
            table.floor_samples.append(bare)
            listing.floor_samples.append(bare)
            click_ms, click_cpu_ms = process_ms(*CLICK)
            beside.floor_samples.append(click_ms)
            cpu.floor_samples.append(click_cpu_ms)
            wall_ms, cpu_ms = process_ms(KVCTL, "list")
            table.samples.append(wall_ms)
            cpu.samples.append(cpu_ms)
            listing.samples.append(process_ms(KVCTL, "list", "--json")[0])
    table.note = f"{seen} instances were listed, those of others on this machine counted in"
    return [table, beside, cpu, empty, listing]
