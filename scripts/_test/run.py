"""Runs a tier of the tests in two lanes, and decides whether the run has passed. See scripts/test.

A failed test is run again, alone, in a fresh process, twice at most. If it passes then, it is
flaky: its outputs are kept in build/flaky, and the run passes unless more than three tests are
flaky. A test of the default tier whose body takes over 10 seconds is run again in the same way; if
it takes as long each time, the run fails, unless other programs kept the processors busy each time.
Each run appends a line to build/test-runs.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "programs"))

import conditions
import covered_lines
from lanes import RESULTS, Lane, Workspace
from results import MOST_FLAKY, SLOW_S, Results

FLAKY = Path("build/flaky")
RUNS = Path("build/test-runs.jsonl")
TRIES = 2
MOST_RUN_AGAIN = 10
"""More failures than this are not flakiness, and running all again would take too long."""
_LOOK_S = 0.2


class Ended(BaseException):
    """SIGINT or SIGTERM arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main() -> int:
    options, pytest_arguments = _parse(sys.argv[1:])
    if pytest_arguments:
        if options.stress or options.late_threads or options.coverage:
            print(
                "--stress, --late-threads and --coverage are for a whole tier; leave out",
                *pytest_arguments,
            )
            return 2
        # Tests that are named: one ordinary pytest, with a terminal and a debugger.
        tier = options.tier if options.tier != "default" else "all"
        os.execv(
            sys.executable, [sys.executable, "-m", "pytest", f"--tier={tier}", *pytest_arguments]
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        run_under = ["busy", "one core"] if options.stress else []
        run_under += ["late threads"] if options.late_threads else []
        run_under = run_under or [""]
        passed = [_run(options.tier, each, covers=options.coverage) for each in run_under]
        return 0 if all(passed) else 1
    except Ended as ended:
        print(f"\nended by {signal.Signals(ended.number).name}", flush=True)
        return 128 + ended.number


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    tier = parser.add_mutually_exclusive_group()
    for name in ("fast", "all", "soak"):
        tier.add_argument(f"--{name}", dest="tier", action="store_const", const=name)
    parser.set_defaults(tier="default")
    for name in ("stress", "late-threads", "coverage"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_known_args(arguments)


def _end(number: int, _: object) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # the second one would interrupt the clean-up
        signal.signal(each, signal.SIG_IGN)
    raise Ended(number)


def _run(tier: str, condition: str, *, covers: bool) -> bool:
    began = datetime.now(timezone.utc)
    with Workspace() as workspace:
        with ExitStack() as around:
            if condition == "busy":
                around.enter_context(conditions.busy(workspace.folder))
            elif condition == "one core":
                around.enter_context(conditions.one_core())
            elif condition == "late threads":
                around.enter_context(conditions.late_threads())
            if covers:
                around.enter_context(covered_lines.measured(workspace.folder))
            run = Run(
                workspace, tier, checks_seconds=tier == "default" and not (condition or covers)
            )
            try:
                run.run_lanes()
                run.run_again()
            finally:
                run.print_failures()
        if covers:
            covered_lines.print_report(workspace.folder)
    _report(run, condition or "as it is", began)
    return run.results.has_passed()


def _report(run: Run, condition: str, began: datetime) -> None:
    results = run.results
    minutes = round((datetime.now(timezone.utc) - began).total_seconds() / 60, 1)
    peak_memory_gib = round(run.peak_memory_bytes / 2**30, 1)
    row = {
        "began": began.isoformat(timespec="seconds"),
        "tier": run.tier,
        "condition": condition,
        "minutes": minutes,
        "failed": results.failed(),
        "flaky": results.flaky,
        "too_slow": results.too_slow,
        "problems": len(results.problems),
        "peak_memory_gib": peak_memory_gib,
        "passed": results.has_passed(),
    }
    with RUNS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"tier {run.tier}, {condition}: {minutes} min, at most {peak_memory_gib} GiB of memory,"
        f" {len(results.flaky)} flaky"
    )
    print(results.closing_line(), flush=True)


class Run:
    """One run of a tier."""

    def __init__(self, workspace: Workspace, tier: str, *, checks_seconds: bool) -> None:
        self.results = Results()
        self.peak_memory_bytes = 0
        self._workspace = workspace
        self.tier = tier
        self._checks_seconds = checks_seconds
        self._memory_at_start = conditions.available_memory_bytes()
        if self._memory_at_start < conditions.MEMORY_NEEDED_BYTES:
            print(
                f"{self._memory_at_start / 2**30:.1f} GiB of memory is available, and the tests"
                f" need up to {conditions.MEMORY_NEEDED_BYTES >> 30} GiB: the kernel may kill some"
                " of them. End other programs, or run some tests only."
            )
        free_disk_bytes = shutil.disk_usage(workspace.folder).free
        if free_disk_bytes < conditions.DISK_NEEDED_BYTES:
            print(
                f"{free_disk_bytes / 2**30:.1f} GiB is free in {workspace.folder.parent}, and the"
                f" tests write up to {conditions.DISK_NEEDED_BYTES >> 30} GiB there: the run may"
                " fail. Remove files, or set TMPDIR to a folder of another disk."
            )

    def run_lanes(self) -> None:
        """Run all tests of the tier."""
        claims = RESULTS / "claims"
        claims.mkdir()
        first = {"engines": "engine", "others": "other"}
        if not self._workspace.is_isolated:
            # These tests inspect the whole machine, so two lanes would disturb each other.
            first = {"all": "other"}
        shared = ["tests", f"--tier={self.tier}", f"--lane-claims={claims.resolve()}"]
        lanes = [
            self._workspace.start_lane(name, [*shared, f"--lane-first={order}"])
            for name, order in first.items()
        ]
        self._follow(lanes, shown=True)
        for lane in lanes:
            # 1: tests have failed, which their events say; 5: this lane had none left to run.
            if lane.process.returncode not in {0, 1, 5}:
                self.results.problems.append(
                    f"the lane {lane.name} ended with {lane.process.returncode}; running were"
                    f" {self.results.unfinished()}; the end of {lane.output}:\n{_tail(lane.output)}"
                )
        if missing := self.results.never_run():
            self.results.problems.append(f"{len(missing)} tests were collected and not run")

    def run_again(self) -> None:
        """Run each failed test alone, twice at most, and each slow one if that is checked."""
        failed = self.results.failed()
        if len(failed) > MOST_RUN_AGAIN:
            print(f"{len(failed)} tests failed: more than {MOST_RUN_AGAIN} are not run again")
        else:
            for name in failed:
                self._run_failed_again(name)
        if self._checks_seconds:
            for name in self.results.slow():
                self._run_slow_again(name)

    def _run_failed_again(self, name: str) -> None:
        for number in range(TRIES):
            alone, output = self._run_alone(name)
            again = alone.tests.get(name)
            if again is not None and again.outcome == "passed" and not alone.problems:
                self.results.passed_again(name)
                kept = _keep_flaky(name, self.results.tests[name].text, output)
                print(f"\nFLAKY {name}: failed, and passed alone at try {number + 1}; see {kept}")
                print(f"--- when it failed\n{self.results.tests[name].text}")
                print(f"--- when it passed\n{output}", flush=True)
                return

    def _run_slow_again(self, name: str) -> None:
        in_lane_s = self.results.tests[name].body_s
        tries: list[tuple[float, float]] = []
        for _ in range(TRIES):
            others = conditions.OtherPrograms()
            alone, _ = self._run_alone(name)
            share = others.share()
            again = alone.tests.get(name)
            if again is None or again.outcome != "passed":
                continue
            if again.body_s <= SLOW_S:
                took = f"took {in_lane_s:.1f} s, and {again.body_s:.1f} s alone"
                print(f"slow: {name} {took}", flush=True)
                return
            tries.append((again.body_s, share))
        judged = [body_s for body_s, share in tries if share <= conditions.QUIET_SHARE]
        if tries and not judged:
            least = min(share for _, share in tries)
            print(
                f"slow, not judged: {name} took {in_lane_s:.1f} s. When it ran alone, other"
                f" programs used {least:.0%} of the processors; end them to have it judged.",
                flush=True,
            )
            return
        self.results.too_slow.append(f"{name} takes {min([in_lane_s, *judged]):.1f} s")

    def _run_alone(self, name: str) -> tuple[Results, str]:
        count = sum(1 for _ in RESULTS.glob("alone-*.jsonl"))
        lane = self._workspace.start_lane(f"alone-{count}", ["--tier=soak", name])
        results, self.results = self.results, Results()
        try:
            self._follow([lane], shown=False)
        finally:
            alone, self.results = self.results, results
        return alone, _tail(lane.output)

    def _follow(self, lanes: list[Lane], *, shown: bool) -> None:
        """Take events until the lanes end."""
        progress = {lane: Progress() for lane in lanes}
        is_over = False
        while not is_over:
            time.sleep(_LOOK_S)
            is_over = not any(lane.is_running() for lane in lanes)
            for lane in lanes:
                for event in lane.new_events():
                    self.results.add(event)
                    if shown:
                        progress[lane].show(event)
            used = self._memory_at_start - conditions.available_memory_bytes()
            self.peak_memory_bytes = max(self.peak_memory_bytes, used)

    def print_failures(self) -> None:
        results = self.results
        for name in results.failed():
            print(f"\nFAILED {name}\n{results.tests[name].text}")
        for problem in results.problems:
            print(f"\nFAILED outside of tests: {problem}")
        for line in results.too_slow:
            print(
                f"\nTOO SLOW {line}, alone too; at most {SLOW_S:g} s are allowed, without fixtures"
            )
        if len(results.flaky) > MOST_FLAKY:
            print(f"\n{len(results.flaky)} tests are flaky, {MOST_FLAKY} are allowed")
        sys.stdout.flush()


class Progress:
    """Prints one line per group of a lane, and each failure immediately."""

    def __init__(self) -> None:
        self._of_group = Results()

    def show(self, event: dict) -> None:
        self._of_group.add(event)
        if event.get("outcome") == "failed":
            print(f"FAILED {event['test']} ({event['phase']})", flush=True)
        if "group" in event:
            seconds = sum(result.seconds for result in self._of_group.tests.values())
            counts = self._of_group.closing_line().replace(", 0 failed", "")
            print(
                f"{event['group']}: {counts.replace(', 0 skipped', '')}, {seconds:.1f} s",
                flush=True,
            )
            self._of_group = Results()


def _keep_flaky(name: str, failed: str, passed: str) -> Path:
    FLAKY.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "_", name)[-150:]
    file = FLAKY / f"{datetime.now(timezone.utc):%Y-%m-%dT%H%M%S}-{stem}.txt"
    file.write_text(f"{name}\n\n--- when it failed\n{failed}\n--- when it passed\n{passed}")
    return file


def _tail(file: Path, characters: int = 6000) -> str:
    return file.read_text(errors="replace")[-characters:]


if __name__ == "__main__":
    sys.exit(main())
