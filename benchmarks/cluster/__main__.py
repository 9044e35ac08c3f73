"""`scripts/bench cluster`: kvelastic under Ray Serve beside Ray Serve alone.

scripts/bench cluster                    all of it, about twenty minutes
scripts/bench cluster --part proxy       what the front adds to a fast fake engine, on one host
scripts/bench cluster --part memory      two models with bursts in turn, on two hosts
scripts/bench cluster --quick            few rounds; its figures are no evidence
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import needs
from hosts import Host

from benchmarks.cluster import memory
from benchmarks.harness import Figure
from benchmarks.pages import ROOT, Measure, Table, arguments, run

PORT = 8123
PREFIXES = {"kvelastic": "", "Ray alone": "/plain"}
STREAMS = 8
CHUNKS = 128
Load = Callable[[str, dict[str, Any]], dict[str, float]]
"""Puts one of PREFIXES under a load of `benchmarks.router.load`; returns what the load saw."""


@contextmanager
def applications() -> Iterator[Load]:
    """Both, in a network of their own: Ray listens on all interfaces."""
    if not needs.RAY_PYTHON.is_file():
        raise RuntimeError(f"{needs.RAY_PYTHON} is not there: scripts/setup --ray")
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    environment |= {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_raylet_start_wait_time_s": "300"}
    environment |= {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="kvbench") as folder, Host() as host:
        log = Path(folder, "log")
        with log.open("w") as file:
            program = host.start(
                str(needs.RAY_PYTHON), "-m", "benchmarks.cluster.apps", sys.executable, str(PORT),
                environment=environment | {"RAY_TMPDIR": folder}, cwd=ROOT,
                stdout=subprocess.PIPE, stderr=file,
            )  # fmt: skip
        assert program.stdout is not None
        if "ready\n" not in program.stdout:  # reads until it is there
            raise RuntimeError(log.read_text()[-3000:])

        def load(name: str, plan: dict[str, Any]) -> dict[str, float]:
            words = [str(PORT), json.dumps({**plan, "prefix": PREFIXES[name]})]
            command = host.command(sys.executable, "-m", "benchmarks.router.load", *words)
            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=plan["seconds"] + 120
            )
            found: dict[str, float] = json.loads(done.stdout)
            return found

        try:
            yield load
        finally:
            host.kill()
            program.wait()


def measure(is_quick: bool) -> Table:
    """Both applications in turns, round by round."""
    seconds, rounds = (2.0, 3) if is_quick else (10.0, 9)
    one = {"clients": 1, "seconds": seconds}
    streams = {"clients": STREAMS, "seconds": seconds, "chunks": CHUNKS}
    first = Figure("first byte p50, one client", "ms", [], "", "Ray alone")
    added = Figure("added by kvelastic", "ms", [], "<= 5 ms")
    chunks = Figure(f"chunks/s, {STREAMS} streams", "/s", [], ">= 0.95", "Ray alone")
    with applications() as load:
        for name in PREFIXES:
            load(name, {**streams, "seconds": 1.0})  # all connections, all code
        for number in range(rounds):
            names = list(PREFIXES)[:: -1 if number % 2 else 1]
            p50 = {name: load(name, one)["p50_ms"] for name in names}
            speed = {name: load(name, streams)["chunks_per_s"] for name in names}
            first.samples.append(p50["kvelastic"])
            first.floor_samples.append(p50["Ray alone"])
            added.samples.append(p50["kvelastic"] - p50["Ray alone"])
            chunks.samples.append(speed["kvelastic"])
            chunks.floor_samples.append(speed["Ray alone"])
    return Table.of_figures([first, added, chunks])


def parts(memory_part: Measure) -> dict[str, tuple[str, Measure]]:
    """All parts by name."""
    return {
        "proxy": ("One replica, one fast fake engine", measure),
        "memory": ("Two models with bursts in turn, on two hosts", memory_part),
    }


def main() -> int:
    """Measure, print and keep; returns the exit status."""
    names = parts(memory.part())
    given = arguments("cluster", __doc__, names, add_options=memory.add_options)
    return run("cluster", "Ray Serve benchmark", given, parts(memory.part(given)))


if __name__ == "__main__":
    sys.exit(main())
