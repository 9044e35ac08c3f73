"""`scripts/bench two_models`: two models in one budget against the same two with half of it each.

The two ways take turns; in each a burst goes to model A while B has nothing to do, and then the
other way round. `--quick` does one round. README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import http.client
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import psutil

from benchmarks.two_models import report, woken
from benchmarks.two_models.bursts import BurstResult, measure
from benchmarks.two_models.client import RequestFailedError, make_burst, run_burst
from benchmarks.two_models.memory import MemoryWatch
from benchmarks.two_models.servers import SHARED, WAYS, Servers
from benchmarks.two_models.workload import MODELS, QUICK, WHOLE, Workload

ROOT = Path(__file__).parents[2]
SETTLE_S = 8.0
"""After the last burst: longer than KVELASTIC_IDLE_TRIM_SECONDS."""
FAILURES = (
    RequestFailedError,
    AssertionError,  # of VllmServer
    OSError,
    http.client.HTTPException,
    subprocess.SubprocessError,
    psutil.Error,
)


def model_folder() -> Path:
    done = subprocess.run(
        [ROOT / "scripts" / "model", "--print-folder"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Path(done.stdout.strip())


def warm_up(servers: Servers, ways: Sequence[str] = WAYS) -> None:
    """The first requests after the start are slow; nothing of them is counted."""
    for way in ways:
        for model in MODELS:
            run_burst(servers[way, model].port, make_burst(2, 64, 8, 0.1, "warm-up"))


def rounds(servers: Servers, watch: MemoryWatch, workload: Workload) -> list[BurstResult]:
    """Who begins changes from round to round: the second finds the machine as the first left it."""
    results: list[BurstResult] = []
    begin_s = time.monotonic()
    for number in range(workload.rounds):
        if time.monotonic() - begin_s > workload.new_rounds_for_s:
            print(f"  no more rounds after {number}: the machine is slow today", flush=True)
            break
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            for model in MODELS:
                requests = workload.burst(number, model)
                results.append(measure(servers, watch, way, model, number, requests))
                print(report.burst_line(results[-1]), flush=True)
    return results


def run(workload: Workload) -> int:
    print(report.workload_lines(workload), flush=True)
    with (
        TemporaryDirectory(prefix="kvelastic-two-models-") as folder,
        Servers(model_folder(), workload, Path(folder)) as servers,
    ):
        try:
            print(f"  four servers ready after {servers.start():.0f} s", flush=True)
            warm_up(servers)
            with MemoryWatch(servers) as watch:
                results = rounds(servers, watch, workload)
                time.sleep(SETTLE_S)
                afterwards = watch.look()
            awakening = woken.measure(servers, workload)
            left = servers.stop()
        except FAILURES as error:
            print(servers.log_ends(), file=sys.stderr)
            print(f"\ntwo_models failed: {error or type(error).__name__}"[:2000], file=sys.stderr)
            return 1
    report.write(workload, results, watch.samples, afterwards, awakening, left)
    return 0


def run_woken(workload: Workload) -> int:
    """Only the first token of a woken model: two servers, and none of the bursts."""
    with (
        TemporaryDirectory(prefix="kvelastic-two-models-") as folder,
        Servers(model_folder(), workload, Path(folder), (SHARED,)) as servers,
    ):
        try:
            print(f"  two servers ready after {servers.start():.0f} s", flush=True)
            warm_up(servers, (SHARED,))
            awakening = woken.measure(servers, workload)
            left = servers.stop()
        except FAILURES as error:
            print(servers.log_ends(), file=sys.stderr)
            print(f"\ntwo_models failed: {error or type(error).__name__}"[:2000], file=sys.stderr)
            return 1
    report.write_woken(workload, awakening, left)
    return 0


def interrupted(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="scripts/bench two_models", description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="one round, under five minutes")
    arguments.add_argument(
        "--woken", action="store_true", help="only a woken model's first token, two minutes"
    )
    chosen = arguments.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        workload = QUICK if chosen.quick else WHOLE
        sys.exit(run_woken(workload) if chosen.woken else run(workload))
    except KeyboardInterrupt:
        print("\nStopped: all servers have ended, and nothing is left of them.", file=sys.stderr)
        sys.exit(130)
