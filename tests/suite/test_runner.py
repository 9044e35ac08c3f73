"""`scripts/test` itself: failed tests are run again, and a signal ends all that it has started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import needs
import psutil
import pytest
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow


TESTS = Path(__file__).parents[1]
RUNNER = TESTS.parent / "scripts" / "_test" / "run.py"
SETTINGS = f"""
[tool.pytest.ini_options]
pythonpath = ["{TESTS / "programs"}"]
markers = ["engine", "end_to_end", "slow", "matrix", "soak"]
"""
FAILS_AT_FIRST = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(COUNT))
def test_fails_at_first(number):
    file = Path(f"seen-{number}")
    if not file.exists():
        file.touch()
        raise AssertionError("the first time")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the real conftest.py, and no test yet."""
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").symlink_to(TESTS / "conftest.py")
    (tmp_path / "temporary").mkdir()
    return tmp_path


def start(project: Path, source: str, *arguments: str) -> subprocess.Popen[str]:
    (project / "tests" / "test_inner.py").write_text(source)
    return subprocess.Popen(
        [sys.executable, str(RUNNER), *arguments],
        cwd=project,
        env=os.environ | {"TMPDIR": str(project / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(project: Path, source: str, *arguments: str) -> tuple[int, str]:
    """Return the exit code and the output."""
    process = start(project, source, *arguments)
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def last_run(project: Path) -> dict[str, object]:
    lines = (project / "build" / "test-runs.jsonl").read_text().splitlines()
    row: dict[str, object] = json.loads(lines[-1])
    return row


def test_test_passing_alone_is_reported_as_flaky(project: Path) -> None:
    name = "tests/test_inner.py::test_fails_at_first[0]"
    exit_code, output = run(project, FAILS_AT_FIRST.replace("COUNT", "1"))
    assert exit_code == 0, output
    assert f"FLAKY {name}" in output
    assert output.endswith("\n1 passed, 0 failed, 0 skipped\n")
    assert last_run(project)["flaky"] == [name]
    (kept,) = (project / "build" / "flaky").iterdir()
    assert "AssertionError: the first time" in kept.read_text()
    assert "1 passed" in kept.read_text()


def test_more_than_three_flaky_tests_fail_the_run(project: Path) -> None:
    exit_code, output = run(project, FAILS_AT_FIRST.replace("COUNT", "4"))
    assert exit_code == 1
    assert "4 tests are flaky, 3 are allowed" in output


def test_test_failing_three_times_fails_the_run(project: Path) -> None:
    source = """
def test_fails():
    with open("times", "a") as file:
        file.write("x")
    assert False, "always"
"""
    exit_code, output = run(project, source)
    assert exit_code == 1
    assert (project / "times").read_text() == "xxx"
    assert "FAILED tests/test_inner.py::test_fails\n" in output
    assert "AssertionError: always" in output
    assert output.endswith("\n0 passed, 1 failed, 0 skipped\n")


def test_dead_lane_fails_the_run(project: Path) -> None:
    source = """
import os, signal
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(): pass
"""
    exit_code, output = run(project, source)
    assert exit_code == 1
    assert "running were ['tests/test_inner.py::test_dies']" in output
    assert "1 tests were collected and not run" in output


def test_leftover_process_fails_the_run(project: Path) -> None:
    source = """
import run_end, subprocess
run_end.ENDING_S = 0.2
def test_leaves(): subprocess.Popen(["sleep", "1000"], start_new_session=True)
"""
    exit_code, output = run(project, source)
    assert exit_code == 1
    assert "now killed: sleep 1000" in output


def test_stress_of_named_tests_is_rejected(project: Path) -> None:
    exit_code, output = run(project, "def test_a(): pass", "--stress", "tests/test_inner.py")
    assert exit_code == 2
    assert output == (
        "--stress, --late-threads and --coverage are for a whole tier; leave out"
        " tests/test_inner.py\n"
    )


def test_uncollectable_file_fails_the_run(project: Path) -> None:
    exit_code, output = run(project, "import no_such_module")
    assert exit_code == 1
    assert "tests/test_inner.py cannot be collected" in output


def test_late_threads_start_late_in_all_processes(project: Path) -> None:
    source = """
import subprocess, sys
SHOW = "import threading; assert threading.Thread.start.__name__ == '_start_late'"
def test_is_late(): subprocess.run([sys.executable, "-c", SHOW], check=True)
"""
    exit_code, output = run(project, source, "--late-threads")
    assert exit_code == 0, output
    assert "tier default, late threads: " in output


@pytest.mark.parametrize(("tier", "passed"), [("fast", 1), ("", 3), ("all", 5), ("soak", 6)])
def test_each_tier_adds_its_tests(project: Path, tier: str, passed: int) -> None:
    source = """
import pytest
def test_plain(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.engine
@pytest.mark.end_to_end
def test_end_to_end(): pass
@pytest.mark.engine
def test_engine(): pass
@pytest.mark.matrix
def test_matrix(): pass
@pytest.mark.soak
def test_soak(): pass
"""
    exit_code, output = run(project, source, *([f"--{tier}"] if tier else []))
    assert exit_code == 0, output
    assert output.endswith(f"\n{passed} passed, 0 failed, 0 skipped\n")


class Blocked:
    """A run whose one test has started a process in a session of its own, and blocks."""

    def __init__(self, project: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.runner = start(
            project,
            f"""
import pathlib, subprocess, sys, tempfile, threading
def test_blocks(tmp_path):
    pathlib.Path("/dev/shm/kvelastic_{self.mark}").touch()
    tempfile.mkdtemp()
    subprocess.Popen([sys.executable, "-c", "input()", "{self.mark}"], start_new_session=True,
                     stdin=subprocess.PIPE)
    pathlib.Path("started").touch()
    threading.Event().wait()
""",
        )
        wait_until((project / "started").exists, "the test does not start")
        # A process has no command line for a moment after `Popen` has returned.
        wait_until(lambda: not self.is_gone(), "the test starts no process")

    def is_gone(self) -> bool:
        lines = (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
        return not any(self.mark in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_signal_ends_every_process_and_removes_every_file(
    project: Path, number: signal.Signals
) -> None:
    blocked = Blocked(project)
    blocked.runner.send_signal(number)
    output, _ = blocked.runner.communicate(timeout=DEADLINE_S)
    assert blocked.runner.returncode == 128 + number
    assert f"ended by {number.name}" in output
    assert blocked.is_gone()
    assert list((project / "temporary").iterdir()) == []
    assert not Path(f"/dev/shm/kvelastic_{blocked.mark}").exists()


@needs.root
def test_run_after_sigkill_removes_leftovers(project: Path) -> None:
    blocked = Blocked(project)
    blocked.runner.kill()
    blocked.runner.communicate(timeout=DEADLINE_S)
    wait_until(blocked.is_gone, "processes of a killed run live on")
    (left,) = (project / "temporary").iterdir()
    exit_code, output = run(project, "def test_a(): pass")
    assert exit_code == 0, output
    assert not left.exists()


def test_slow_test_of_default_tier_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body counts, and its fixtures do not."""
    monkeypatch.syspath_prepend(RUNNER.parent)
    from results import Results

    results = Results()
    for name, seconds in (("quick", (30, 10, 30)), ("slow", (0, 10.1, 0)), ("engine", (0, 60, 0))):
        for phase, took_s in zip(("setup", "call", "teardown"), seconds, strict=True):
            results.add({"test": name, "phase": phase, "outcome": "passed", "seconds": took_s})
    results.add({"collected": ["quick", "slow", "engine"], "end_to_end": ["engine"]})
    assert results.slow() == ["slow"]


def run_of_slow_test(project: Path, most_of_others: float) -> tuple[int, str]:
    """One whose test takes longer than its bound on a machine of any speed."""
    (project / "tests" / "test_inner.py").write_text("def test_a(): pass")
    program = (
        "import conditions, results, sys; results.SLOW_S = -1;"
        f" conditions.QUIET_SHARE = {most_of_others}; import run; sys.exit(run.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(RUNNER.parent)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_test_slow_even_alone_fails_the_run(project: Path) -> None:
    exit_code, output = run_of_slow_test(project, most_of_others=1)
    assert exit_code == 1
    assert re.search(r"TOO SLOW tests/test_inner.py::test_a takes \S+ s, alone too", output)
    assert not last_run(project)["passed"]


def test_slow_test_on_a_busy_machine_is_tolerated(project: Path) -> None:
    exit_code, output = run_of_slow_test(project, most_of_others=-1)
    assert exit_code == 0, output
    assert re.search(
        r"slow, not judged: tests/test_inner.py::test_a took \S+ s. When it ran alone, other"
        r" programs used \d+% of the processors",
        output,
    )
    assert last_run(project)["too_slow"] == []


def test_reaped_children_are_not_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RUNNER.parent)
    from conditions import CpuTimes

    computed_s = 0.5
    before = CpuTimes.now()
    program = f"import time\nwhile time.process_time() < {computed_s}: pass"
    subprocess.run([sys.executable, "-c", program], check=True)
    after = CpuTimes.now()
    assert after.own_s - before.own_s >= computed_s
    # The kernel counts hundredths of a second, which are not exact as floats.
    all_ticks, busy_ticks = (
        round(100 * elapsed_s)
        for elapsed_s in (after.all_s - before.all_s, after.busy_s - before.busy_s)
    )
    assert all_ticks >= busy_ticks > 0


def test_cpu_share_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processors for ten seconds, the run used six and others three."""
    monkeypatch.syspath_prepend(RUNNER.parent)
    from conditions import CpuTimes, OtherPrograms

    times = iter([CpuTimes(100, 50, 7), CpuTimes(120, 59, 13)])
    monkeypatch.setattr(CpuTimes, "now", lambda: next(times))
    assert OtherPrograms().share() == pytest.approx(3 / 20)


def test_help_names_every_tier() -> None:
    script = TESTS.parent / "scripts" / "test"
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert set(re.findall(r"scripts/test (--\w+)", done.stdout)) >= {"--fast", "--all", "--soak"}
