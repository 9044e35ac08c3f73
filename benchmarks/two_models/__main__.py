"""`scripts/bench two_models`: two models in one budget against the same two with half of it each.

First bursts in turn: in each way a burst goes to model A while B has nothing to do, and then the
other way round. Then the published schedule of staggered bursts (`--staggered` alone), with other
ways besides. README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import http.client
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks import harness
from benchmarks.two_models import calibration, report, woken
from benchmarks.two_models.bursts import BurstResult, measure
from benchmarks.two_models.client import RequestFailedError, make_burst, run_burst
from benchmarks.two_models.memory import MemoryWatch
from benchmarks.two_models.servers import SHARED, WAYS, Servers, two_models_in_turn
from benchmarks.two_models.staggered import run as staggered
from benchmarks.two_models.staggered import ways as staggered_ways
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


def failed(error: BaseException) -> int:
    """Say so; answers the exit status."""
    print(f"\ntwo_models failed: {error or type(error).__name__}"[:2000], file=sys.stderr)
    return 1


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
        Servers(model_folder(), Path(folder), two_models_in_turn(workload)) as servers,
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
            return failed(error)
    report.write(workload, results, watch.samples, afterwards, awakening, left)
    return 0


def run_woken(workload: Workload) -> int:
    """Only the first token of a woken model: two servers, and none of the bursts."""
    with (
        TemporaryDirectory(prefix="kvelastic-two-models-") as folder,
        Servers(model_folder(), Path(folder), two_models_in_turn(workload, (SHARED,))) as servers,
    ):
        try:
            print(f"  two servers ready after {servers.start():.0f} s", flush=True)
            warm_up(servers, (SHARED,))
            awakening = woken.measure(servers, workload)
            left = servers.stop()
        except FAILURES as error:
            print(servers.log_ends(), file=sys.stderr)
            return failed(error)
    report.write_woken(workload, awakening, left)
    return 0


def run_staggered(chosen: argparse.Namespace, speed: calibration.Speed) -> int:
    """The published schedule, with the prefix cache on, off, or first on and then off."""
    for on in (True, False):
        if chosen.cache in {"both", "on" if on else "off"}:
            ways = staggered.ways_of(prefix_cache=on, quick=chosen.quick)
            if chosen.ways:
                of_all = staggered.ways_of(prefix_cache=on, quick=False)
                ways = tuple(way for way in chosen.ways if way in of_all)
            if not ways:
                print("  tiers need the prefix cache: nothing to run without it", flush=True)
                continue
            try:
                staggered.run(model_folder(), speed, prefix_cache=on, ways=ways)
            except (*FAILURES, MemoryError, ValueError) as error:
                return failed(error)
    return 0


def chosen_ways(text: str) -> list[str]:
    """`halves,kvelastic_tiers`."""
    ways = text.split(",")
    if unknown := [way for way in ways if way not in staggered_ways.WAYS]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: no such way; there are {', '.join(staggered_ways.WAYS)}"
        )
    if len(set(ways)) < len(ways):
        raise argparse.ArgumentTypeError(f"{text}: each way once")
    return ways


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench two_models", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one round, or the ways that have bars"
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--woken", action="store_true", help="only a woken model's first token, two minutes"
    )
    part.add_argument(
        "--staggered", action="store_true", help="only the published schedule of staggered bursts"
    )
    part.add_argument("--bursts", action="store_true", help="only the bursts in turn")
    only = parser.add_argument_group("of the staggered bursts")
    only.add_argument(
        "--cache", choices=("on", "off", "both"), default="both", help="vLLM's prefix cache"
    )
    only.add_argument(
        "--ways", type=chosen_ways, metavar="WAY,WAY", help=", ".join(staggered_ways.WAYS)
    )
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    workload = QUICK if chosen.quick else WHOLE
    if chosen.woken:
        return run_woken(workload)
    try:
        speed = calibration.measure(model_folder())
    except FAILURES as error:
        return failed(error)
    if not chosen.staggered and (status := run(workload.on_machine(speed.step_s))):
        return status
    return 0 if chosen.bursts else run_staggered(chosen, speed)


if __name__ == "__main__":
    harness.end_by_exception()
    sys.exit(main())
