"""Runs the steps of a part, one after another, each in a process of its own."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError
from tempfile import TemporaryDirectory

from benchmarks import harness
from benchmarks.gpu import child, findings, places, requirements
from benchmarks.gpu.state import CUT, FAILED, NOT_RUN, PASSED, RUNNING, TIMED_OUT, Outcome, State
from benchmarks.gpu.step_list import BUILD, STEPS, Step


class AnotherRunsError(Exception):
    """Two at once would build over each other and measure each other."""


@contextmanager
def alone(work: Path) -> Iterator[Path]:
    """A folder for what steps leave, empty, and gone at the end.

    Raises `AnotherRunsError` while another `scripts/gpu` runs in `work`.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AnotherRunsError(
                f"another scripts/gpu runs in {work}; wait for its end"
            ) from error
        # In memory, and not under the results: a full disk is no step's fault. The name is always
        # the same, so that one who was killed leaves nothing to the next.
        parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else work
        name = hashlib.sha256(bytes(work.resolve())).hexdigest()[:12]
        scratch = parent / f"bench_gpu_{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=0o700)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@dataclass
class Part:
    """One command: some of the steps, in a time that ends."""

    state: State
    scratch: Path
    """Where each step has a folder of its own."""
    installed: bool
    """Whether this Python has the native module, so that none is built."""
    part_s: float
    keep: Callable[[], None]
    """Writes the results; called after every change."""
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._ends = time.monotonic() + self.part_s
        self._begun_any = False

    def run(self) -> list[str]:
        """Carries out what is still to do; returns the names of the steps that are left."""
        left: list[str] = []
        chosen = [step for step in STEPS if not self.only or step.name in self.only]
        for step in chosen:
            outcome = self.state.steps.setdefault(step.name, Outcome())
            if left or outcome.is_final:
                if not outcome.is_final:
                    left.append(step.name)
                continue
            why = self._missing(step)
            if why:
                self._say(step, f"not run: {why}")
                outcome.status, outcome.why = NOT_RUN, why
                self.keep()
            elif not self._has_time_for(step):
                left.append(step.name)
            else:
                self._run_step(step, outcome)
                if outcome.status == CUT:
                    left.append(step.name)
        return left

    def _missing(self, step: Step) -> str:
        if step is BUILD:
            return "kvelastic is installed here" if self.installed else ""
        needs = step.needs if self.state.simulated else ("gpu", *step.needs)
        if why := requirements.missing(needs, simulated=self.state.simulated):
            return why
        if self.installed:
            return ""
        build = self.state.steps.setdefault(BUILD.name, Outcome())
        if not build.is_final or (build.status == PASSED and not places.is_built()):
            self._run_step(BUILD, build)
        return "" if build.status == PASSED else "needs the native module, which was not built"

    def _has_time_for(self, step: Step) -> bool:
        """The first one is begun in any case: else a short part would never get beyond it."""
        return not self._begun_any or self._ends - time.monotonic() >= step.usual_s

    def _run_step(self, step: Step, outcome: Outcome) -> None:
        in_part_s = max(self._ends - time.monotonic(), 1.0)
        limit_s = min(step.limit_s, in_part_s)
        # What a whole part is too short for has had its chance.
        may_go_on = limit_s < step.limit_s and self._begun_any
        self._begun_any = True
        outcome.status, outcome.starts = RUNNING, outcome.starts + 1
        outcome.at, outcome.commit = time.strftime("%Y-%m-%d %H:%M"), harness.commit()
        outcome.why, outcome.findings, outcome.output = "", {}, ""
        self.keep()
        try:
            self._carry_out(step, outcome, limit_s)
            if outcome.status == TIMED_OUT and may_go_on:
                outcome.status, outcome.starts = CUT, outcome.starts - 1
        except BaseException:
            outcome.status, outcome.why = CUT, "interrupted"
            outcome.starts -= 1
            raise
        finally:
            self.keep()
            self._say(step, _text(outcome))

    def _carry_out(self, step: Step, outcome: Outcome, limit_s: float) -> None:
        with TemporaryDirectory(dir=self.scratch) as folder:
            answer = Path(folder) / "findings.json"
            environment = places.environment(installed=self.installed)
            if self.state.simulated:
                try:
                    environment |= places.simulator(Path(folder) / "machine")
                except (OSError, CalledProcessError) as error:
                    outcome.status, outcome.why = FAILED, f"the simulator was not built: {error}"
                    return
            quick = ("--quick",) if self.state.quick else ()
            ended = child.run(
                [sys.executable, "-m", *step.command, "--json", str(answer), *quick],
                limit_s=limit_s,
                environment=environment,
                folder=Path(folder),
            )
            told, wrong = findings.read(answer)
        outcome.findings, outcome.output, outcome.took_s = told, ended.output, ended.took_s
        failed = [each["name"] for each in told.get("checks", ()) if not each["passed"]]
        outcome.why = ended.how or wrong or "; ".join(failed)
        if ended.timed_out:
            outcome.status = TIMED_OUT
        elif outcome.why:
            outcome.status = FAILED
        elif told.get("skipped"):
            outcome.status, outcome.why = NOT_RUN, str(told["skipped"])
        else:
            outcome.status = PASSED

    def _say(self, step: Step, text: str) -> None:
        print(f"[{STEPS.index(step) + 1}/{len(STEPS)}] {step.name}: {text}", flush=True)


def _text(outcome: Outcome) -> str:
    lines = [f"{outcome.status} after {outcome.took_s:.1f} s{outcome.why and ': '}{outcome.why}"]
    if outcome.status in (FAILED, TIMED_OUT):
        lines += [f"    {line}" for line in outcome.output.splitlines()[-15:]]
    return "\n".join(lines)
