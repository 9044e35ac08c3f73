"""`scripts/bench vllm`: vLLM with kvelastic against stock vLLM, the same requests, in short turns.

    scripts/bench vllm                    a tiny model, whose steps cost least: the hardest case
    scripts/bench vllm --model smollm2    a real one
    scripts/bench vllm --quick            two minutes; its figures are no evidence
    scripts/bench vllm --profile          only what a step of the scheduler costs
    scripts/bench vllm --control          stock against stock: what the machine alone makes

README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks.harness import commit, end_by_exception
from benchmarks.vllm import report, step_cost
from benchmarks.vllm.models import NAMES, Model, prepare
from benchmarks.vllm.report import Findings
from benchmarks.vllm.servers import ORDER, Servers
from benchmarks.vllm.streams import StreamError
from benchmarks.vllm.turns import compare
from benchmarks.vllm.workload import MIXED, SATURATED, Load

QUICK_TURNS = {"mixed": 3, "saturated": 2}
FAILURES = (
    StreamError,
    AssertionError,  # of VllmServer
    OSError,
    TimeoutError,
    http.client.HTTPException,
    subprocess.SubprocessError,
    psutil.Error,
)


def loads(arguments: argparse.Namespace) -> list[Load]:
    chosen = [load for load in (MIXED, SATURATED) if arguments.only in (None, load.name)]
    if arguments.quick:
        chosen = [load.with_turns(QUICK_TURNS[load.name]) for load in chosen]
    if arguments.turns:
        chosen = [load.with_turns(arguments.turns) for load in chosen]
    return chosen


def start_once(model: Model, folder: Path, order: Sequence[str], found: Findings) -> None:
    """Only to see how long it takes."""
    for name in order:
        with Servers(model, MIXED, folder, control=found.control) as servers:
            found.starts += servers.start([name])


def measure(arguments: argparse.Namespace, found: Findings, folder: Path) -> None:
    model = prepare(found.model, folder)
    if not arguments.profile:
        for number, load in enumerate(loads(arguments)):
            print(f"  {load.name}: {load.title}", flush=True)
            with Servers(model, load, folder, control=found.control) as servers:
                found.starts += servers.start(ORDER if number % 2 else ORDER[::-1])
                took = ", ".join(f"{s.server} {s.total_s:.1f} s" for s in found.starts[-2:])
                print(f"  ready: {took}", flush=True)
                found.compared.append(compare(servers, load))
                print(f"\n{report.load_text(found.compared[-1])}\n", flush=True)
        for number in range(arguments.starts):
            start_once(model, folder, ORDER if number % 2 else ORDER[::-1], found)
    if arguments.profile or not arguments.only:
        quick, control = found.quick, found.control
        found.steps = step_cost.measure(model, folder, quick=quick, control=control)


def run(arguments: argparse.Namespace) -> int:
    found = Findings(
        arguments.model,
        arguments.control,
        arguments.quick,
        time.strftime("%Y-%m-%d %H:%M"),
        commit(),
        os.getloadavg()[0],
    )
    failure = None
    with TemporaryDirectory(prefix="kvelastic-bench-vllm-") as folder:
        try:
            measure(arguments, found, Path(folder))
        except FAILURES as error:
            failure = f"vllm failed: {error or type(error).__name__}"[:5000]
    print(f"\n{report.text(found)}")
    if failure:
        print(failure, file=sys.stderr)
        return 1
    if not (arguments.quick or arguments.only or arguments.profile):
        report.keep(found)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench vllm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=NAMES, default="tiny")
    parser.add_argument("--quick", action="store_true", help="a few turns; nothing is kept")
    parser.add_argument("--only", choices=[MIXED.name, SATURATED.name], help="nothing is kept")
    parser.add_argument("--turns", type=int, help="of each load at each server")
    parser.add_argument("--starts", type=int, help="further pairs of starts")
    parser.add_argument("--profile", action="store_true", help="the scheduler only; not kept")
    parser.add_argument("--control", action="store_true", help="both servers are stock vLLM")
    arguments = parser.parse_args()
    if arguments.starts is None:
        arguments.starts = 0 if arguments.quick or arguments.only else 2
    return arguments


if __name__ == "__main__":
    end_by_exception()
    sys.exit(run(parsed()))
