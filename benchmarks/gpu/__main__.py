"""`scripts/gpu`: all that a few minutes on a GPU can tell, in parts that go on where one ended.

    scripts/gpu                     the steps, in order of their value, for eight minutes at most
    scripts/gpu                     again: what is left
    scripts/gpu --list              what each step proves and what it needs
    scripts/gpu --out DIR           results go there too: JSON, and a page of Markdown
    scripts/gpu --simulated         on the simulated driver of tests/sim: what needs no kernels
    scripts/gpu --carry DIR         packs what such a machine lacks for vLLM; needs a package index
    scripts/gpu --carried DIR       the steps, with what was packed

Nothing is installed: the native module is built with CMake and the nanobind of this Python, unless
scripts/setup has built it. A step
that fails, hangs or dies is written down and the next one is begun. Exit code 0: all that could run
has passed; 1: something has not, or nothing could; 3: steps are left, so run it again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.gpu import machine, places, report, runner, state
from benchmarks.gpu.carried import pack
from benchmarks.gpu.requirements import NEEDS_GPU
from benchmarks.gpu.step_list import BUILD, NAMES, STEPS

PART_S = 480
EXIT_FAILED, EXIT_USAGE, EXIT_LEFT = 1, 2, 3


def main() -> int:
    given = _arguments()
    if given.list:
        print(_listed())
        return 0
    try:
        if given.carry:
            return pack.pack(given.carry)
        if given.carried:
            _use(pack.unpack(given.carried, given.work))
    except pack.PackError as error:
        print(f"scripts/gpu: {error}", file=sys.stderr)
        return EXIT_USAGE
    harness.end_by_exception()
    try:
        with runner.alone(given.work) as scratch:
            return _part(given, scratch)
    except (runner.AnotherRunsError, state.StateError) as error:
        print(f"scripts/gpu: {error}", file=sys.stderr)
        return EXIT_USAGE


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="print the steps, and run none")
    parser.add_argument(
        "--part-s", type=float, default=PART_S, metavar="S",
        help=f"seconds that this part may take (default: {PART_S})",
    )  # fmt: skip
    parser.add_argument("--only", action="append", choices=NAMES, metavar="STEP", default=[])
    parser.add_argument(
        "--again", action="append", choices=NAMES, metavar="STEP", default=[],
        help="run a step that has a result once more",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="begin another run")
    parser.add_argument(
        "--resume", type=Path, metavar="JSON",
        help="go on from results brought home, on a machine that has none",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, default=places.BUILD, metavar="DIR",
        help="where a run is kept between its parts (default: build/gpu)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="the folder for JSON and page")
    parser.add_argument(
        "--simulated", action="store_true", help="on the simulated driver: no figure is a GPU's"
    )
    parser.add_argument(
        "--carry", type=Path, metavar="DIR",
        help="pack what a machine without a package index lacks, and run no step",
    )  # fmt: skip
    parser.add_argument("--carried", type=Path, metavar="DIR", help="use what --carry has packed")
    parser.add_argument("--quick", action="store_true", help="short; figures are no evidence")
    return parser.parse_args()


def _use(site: Path) -> None:
    """Have this process and the steps find these packages, behind what is installed."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, str(site.resolve()))))
    sys.path.append(str(site.resolve()))


def _part(given: argparse.Namespace, scratch: Path) -> int:
    kind = ("simulated" if given.simulated else "cuda") + ("-quick" if given.quick else "")
    kept = given.work / kind / "state.json"
    run = _state(given, kept)
    for name in given.again:
        run.steps.pop(name, None)
    facts = machine.facts(simulated=given.simulated)
    if run.facts and run.facts.get("device") != facts["device"]:
        raise state.StateError(
            f"the run that is kept began on {run.facts.get('device')}, and this is"
            f" {facts['device']}; scripts/gpu --fresh begins another"
        )
    run.facts = facts
    # Figures of a simulation, or of a short run, are no results.
    usual = places.RESULTS if kind == "cuda" else given.work / kind
    out = given.out or usual

    def keep() -> None:
        run.write(kept, out / f"{run.stem}.json")
        run.write_text(out / f"{run.stem}.md", report.page(run))

    if run.outcome(BUILD.name).status in (state.FAILED, state.TIMED_OUT):
        run.steps.pop(BUILD.name)  # nothing else can run, and what was wrong may have been mended
    part = runner.Part(
        run,
        scratch,
        places.is_installed(),
        given.part_s,
        keep,
        tuple(given.only) + tuple(given.again),
    )
    left: list[str] = []
    try:
        left = part.run()
    finally:
        keep()
        print()
        print(report.summary(run))
        if run.unwritten:
            print(report.page(run))
            print(f"This page could not be written ({run.unwritten}).")
        else:
            print(f"results: {out / run.stem}.json and .md")
    if left:
        print(f"left: {', '.join(left)}; run the same command again")
        return EXIT_LEFT
    statuses = {run.outcome(name).status for name in NAMES}
    all_passed = state.PASSED in statuses and not statuses & {state.FAILED, state.TIMED_OUT}
    return 0 if all_passed and not run.unwritten else EXIT_FAILED


def _state(given: argparse.Namespace, kept: Path) -> state.State:
    if not given.fresh:
        try:
            return state.load(kept)
        except FileNotFoundError:
            pass
        if given.resume:
            try:
                return state.load(given.resume)
            except FileNotFoundError as error:
                raise state.StateError(f"there is no {given.resume}") from error
    stem = machine.stem(simulated=given.simulated, begun=time.strftime("%Y-%m-%d-%H%M"))
    return state.new(stem, simulated=given.simulated, quick=given.quick)


def _listed() -> str:
    told = []
    for step in STEPS:
        needs = [need for need in step.needs if need != "gpu"]
        wants = ", ".join([NEEDS_GPU] * step.needs_gpu + [f"needs {need}" for need in needs])
        told.append(f"{step.name:18} {step.proves}")
        told.append(f"{'':18}   {wants or 'runs on the simulated driver too'}; {step.limit_s} s")
    return "\n".join(told)


if __name__ == "__main__":
    sys.exit(main())
