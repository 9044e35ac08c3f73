"""`scripts/gpu`: what needs no GPU passes on the simulated driver, and no step hides another.

What a GPU alone can show says so. The runner is tried with steps that hang, die, shout and lie.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import needs
import pytest
from waiting import DEADLINE_S, wait_until

from benchmarks.gpu import child, decisions, findings, report, state, step_list

ROOT = Path(__file__).parents[2]
SIMULATED = [
    "facts",
    "prices",
    "stream-wait",
    "default-stream",
    "capture",
    "ring",
    "battery",
    "random-operations",
    "datadist",
    "copies",
    "fresh-contents",
    "free-memory",
    "limit",
    "killed",
    "killed-tight",
    "handover",
    "vmm-call_costs",
    "vmm-page_cycle",
    "vmm-grow_shrink",
    "vmm-two_processes",
    "device-names",
    "exchange",
    "capture-bare",
    "unnamed-stream",
]
NEEDS_GPU = [
    "decode-graphs",
    "transformers",
    "vllm-graphs",
    "pair",
    "launches",
    "vmm-beside_kernel",
    "not-ready",
    "triton-pointer",
    "attention",
    "kvcached",
    "vllm-float32",
    "tokens",
    "colocation",
    "decode-eager",
    "stale-columns",
    "decode-control",
    "stale-columns-checked",
]
PROVOKING = [
    "capture-bare",
    "unnamed-stream",
    "stale-columns",
    "decode-control",
    "stale-columns-checked",
]
ODD_STEPS = """
    import json, os, signal, subprocess, sys, time
    from pathlib import Path

    here, name, answer = Path(__file__).parent, sys.argv[1], Path(sys.argv[3])
    done = {"done": True, "skipped": "", "checks": [], "figures": {}, "lines": [], "tables": []}

    def begin_other(**how):
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **how)
        (here / "other").write_text(str(other.pid))

    with (here / "begun").open("a") as begun:
        begun.write(name + "\\n")
    if name == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        begin_other(start_new_session=True)
        answer.write_text(json.dumps(done | {"done": False, "lines": ["said before it hung"]}))
        time.sleep(600)
    elif name == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif name == "shouts":
        print("first")
        for _ in range(100):
            sys.stdout.write("x" * (1 << 20))
        print("last")
    elif name == "leaves":
        begin_other(start_new_session=True, stdout=sys.stdout)
    elif name == "half":
        answer.write_text('{"done": tr')
    elif name == "lies":
        answer.write_text(json.dumps(done | {"checks": [{"passed": 1}], "tables": 7}))
    elif name == "nests":
        answer.write_text("[" * 200_000)
    elif name == "waits":
        (here / "pid").write_text(str(os.getpid()))
        while not (here / "go").exists():
            time.sleep(0.01)
    if name in ("shouts", "leaves", "waits", "one", "two", "three"):
        answer.write_text(json.dumps(done))
"""
RUNNER = """
import sys
from benchmarks.gpu import step_list
names = sys.argv.pop(1).split()
step_list.STEPS = tuple(
    step_list.Step(name, "", LIMIT_S if name == "hangs" else 300, USUAL_S, ("odd_steps", name))
    for name in names
)
step_list.NAMES = tuple(names)
from benchmarks.gpu.__main__ import main
sys.exit(main())
"""


class Runner:
    """`scripts/gpu` with steps of this test's own."""

    def __init__(self, folder: Path, hang_limit_s: int = 6, usual_s: int = 5) -> None:
        self.folder = folder
        self.program = RUNNER.replace("LIMIT_S", str(hang_limit_s)).replace("USUAL_S", str(usual_s))
        folder.mkdir(exist_ok=True)
        (folder / "odd_steps.py").write_text(textwrap.dedent(ODD_STEPS))

    def start(self, names: str, *options: str) -> subprocess.Popen[str]:
        usual = ["--simulated", "--work", str(self.folder / "work")]
        return subprocess.Popen(
            [sys.executable, "-c", self.program, names, *usual, *options],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, names: str, *options: str) -> tuple[int, str, str]:
        with self.start(names, *options) as running:
            said, complained = running.communicate(timeout=DEADLINE_S)
        return running.returncode, said, complained

    @property
    def state(self) -> state.State:
        return state.load(self.folder / "work" / "simulated" / "state.json")

    def statuses(self) -> dict[str, str]:
        return {name: each.status for name, each in self.state.steps.items()}

    def begun(self) -> list[str]:
        return (self.folder / "begun").read_text().split()

    def pid_of(self, name: str) -> int:
        """Of the process that wrote it, as soon as it has."""
        path = self.folder / name
        return int(wait_until(lambda: path.exists() and path.read_text()))


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def has_ended(pid: int) -> bool:
    try:
        return "zombie" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended between open and read
        return True


def test_steps_that_need_a_gpu_are_listed() -> None:
    steps = {step.name: step for step in step_list.STEPS}
    assert [name for name, step in steps.items() if step.needs_gpu] == NEEDS_GPU
    assert [name for name, step in steps.items() if not step.needs_gpu] == ["build", *SIMULATED]
    for step in step_list.STEPS:
        assert step.usual_s <= step.limit_s <= 480, step.name
        module = step.command[0].replace(".", "/")
        assert (ROOT / f"{module}.py").is_file(), step.name


def test_steps_that_provoke_faults_come_last() -> None:
    assert [*step_list.NAMES][-len(PROVOKING) :] == PROVOKING


def test_usual_times_fit_one_machine() -> None:
    """Up to `attention`; what comes behind it goes on on the next machine (`--resume`)."""
    first = step_list.STEPS[: step_list.NAMES.index("attention") + 1]
    assert sum(step.usual_s for step in first) < 800, "15 minutes, with the machine's start"


def test_list_shows_purpose_and_requirements_of_steps() -> None:
    listed = subprocess.run(
        [ROOT / "scripts" / "gpu", "--list"], check=True, capture_output=True, text=True
    ).stdout
    for step in step_list.STEPS:
        assert step.name in listed
        assert step.proves in listed
    assert listed.count("needs a GPU") == len(NEEDS_GPU)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SIMULATED[::2], SIMULATED[1::2]], ids=["one half", "other half"])
def test_steps_without_gpu_pass_on_the_simulated_driver(tmp_path: Path, names: list[str]) -> None:
    options = ["--simulated", "--quick", "--work", str(tmp_path / "work")]
    options += [f"--only={name}" for name in [*names, *NEEDS_GPU]]
    done = subprocess.run(
        [ROOT / "scripts" / "gpu", *options, "--out", str(tmp_path / "out")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = state.load(tmp_path / "work" / "simulated-quick" / "state.json").steps
    assert [name for name in names if found[name].status == state.PASSED] == names
    for name in NEEDS_GPU:
        assert (found[name].status, found[name].why) == (state.NOT_RUN, "needs a GPU")
        assert f"{name}: not run: needs a GPU" in done.stdout
    page, kept = sorted((tmp_path / "out").iterdir(), key=lambda path: path.suffix, reverse=True)
    assert json.loads(kept.read_text())["steps"].keys() == found.keys()
    assert "Simulated: no figure on this page was measured on a GPU" in page.read_text()
    assert "The README may say nothing of this run" in page.read_text()


@pytest.mark.slow
def test_failing_step_does_not_stop_the_next(tmp_path: Path) -> None:
    names = "hangs dies shouts leaves half lies nests one"
    for limit_s in (2, 8, 60):
        runner = Runner(tmp_path / str(limit_s), hang_limit_s=limit_s)
        code, said, _ = runner.run(names)
        if runner.state.steps["hangs"].findings.get("lines"):
            break  # else it had not come so far: the machine is busy
    assert code == 1
    assert runner.statuses() == {
        "hangs": "timed out",
        "dies": "failed",
        "shouts": "passed",
        "leaves": "passed",
        "half": "failed",
        "lies": "failed",
        "nests": "failed",
        "one": "passed",
    }
    found = runner.state.steps
    assert found["hangs"].findings["lines"] == ["said before it hung"]
    assert found["dies"].why == "ended by SIGSEGV"
    assert "cannot be read" in found["half"].why
    assert "malformed" in found["lies"].why
    shout = found["shouts"].output
    assert len(shout) < 2 * (child.HEAD_BYTES + child.TAIL_BYTES)
    assert shout.startswith("first\n")
    assert shout.endswith("last\n")
    assert "left out" in shout
    assert has_ended(int((runner.folder / "other").read_text()))
    assert "dies: failed" in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_resumes(runner: Runner, number: signal.Signals) -> None:
    with runner.start("one waits two") as running:
        step = runner.pid_of("pid")
        running.send_signal(number)
        running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 128 + number
    assert has_ended(step)
    assert runner.statuses() == {"one": "passed", "waits": "cut off"}
    (runner.folder / "go").touch()
    assert runner.run("one waits two")[0] == 0
    assert set(runner.statuses().values()) == {"passed"}
    assert runner.begun() == ["one", "waits", "waits", "two"]


@pytest.mark.slow
def test_step_that_kills_the_runner_twice_is_skipped(runner: Runner) -> None:
    for _ in range(2):
        with runner.start("waits two") as running:
            step = runner.pid_of("pid")
            (runner.folder / "pid").unlink()
            running.kill()
            running.communicate(timeout=DEADLINE_S)
        wait_until(partial(has_ended, step), "the step has outlived its runner")
    assert runner.run("waits two")[0] == 1
    assert runner.statuses() == {"waits": "failed", "two": "passed"}
    assert runner.begun() == ["waits", "waits", "two"]
    assert not list(Path("/dev/shm").glob("bench_gpu_*")), "what the killed ones left is gone"


@pytest.mark.slow
def test_next_part_continues_after_the_last(tmp_path: Path) -> None:
    """Each has time for one: they are begun only where their usual time is left."""
    runner = Runner(tmp_path, usual_s=301)
    for left in (["two", "three"], ["three"], []):
        code, said, _ = runner.run("one two three", "--part-s", "300")
        assert code == (3 if left else 0)
        assert ("left: " + ", ".join(left) in said) == bool(left)
    assert runner.begun() == ["one", "two", "three"]
    assert runner.run("one two three", "--again", "two")[0] == 0
    assert runner.run("one two three", "--fresh", "--only", "one")[0] == 0
    assert runner.begun()[3:] == ["two", "one"]


@pytest.mark.slow
def test_step_cut_off_by_a_part_is_repeated(tmp_path: Path) -> None:
    for part_s in (4, 16, 64):
        runner = Runner(tmp_path / str(part_s), usual_s=1)
        code, _, _ = runner.run("one waits", "--part-s", str(part_s))
        if runner.statuses().get("waits") == "cut off":
            break  # else a part is too short for the first step: the machine is busy
    assert code == 3
    assert runner.statuses() == {"one": "passed", "waits": "cut off"}
    (runner.folder / "go").touch()
    assert runner.run("one waits")[0] == 0


@needs.no_gpu
def test_machine_without_a_gpu_is_reported(tmp_path: Path) -> None:
    options = ["--work", str(tmp_path), "--out", str(tmp_path)]
    done = subprocess.run(
        [ROOT / "scripts" / "gpu", *options], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout.count("not run: needs a GPU: no NVIDIA GPU here") >= len(SIMULATED)


def test_concurrent_runs_are_rejected(runner: Runner) -> None:
    (runner.folder / "work").mkdir()
    with (runner.folder / "work" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, complained = runner.run("one")
    assert code == 2
    assert "another scripts/gpu runs in" in complained


@pytest.mark.slow
def test_unwritable_results_are_printed(runner: Runner) -> None:
    (runner.folder / "file").touch()
    code, said, complained = runner.run("one", "--out", str(runner.folder / "file" / "out"))
    assert code == 1
    assert "results cannot be written" in complained
    assert "| one |" in said
    assert runner.statuses() == {"one": "passed"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1, "steps": 7}'])
def test_invalid_state_file_is_rejected(runner: Runner, text: str) -> None:
    path = runner.folder / "work" / "simulated" / "state.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    code, _, complained = runner.run("one")
    assert code == 2
    assert "--fresh begins another" in complained
    assert path.read_text() == text


@pytest.mark.slow
def test_run_resumes_from_saved_results(runner: Runner) -> None:
    assert runner.run("one two", "--only", "one", "--out", str(runner.folder / "home"))[0] == 0
    (kept,) = (runner.folder / "home").glob("*.json")
    other = ["--work", str(runner.folder / "elsewhere")]
    assert runner.run("one two", "--resume", str(kept), *other)[0] == 0
    assert runner.begun() == ["one", "two"]


@pytest.mark.slow
def test_results_of_two_devices_are_not_mixed(runner: Runner) -> None:
    assert runner.run("one two", "--only", "one")[0] == 0
    kept = runner.state
    kept.facts["device"] = "NVIDIA H200, driver 580.95"
    kept.write(runner.folder / "work" / "simulated" / "state.json")
    code, _, complained = runner.run("one two")
    assert code == 2
    assert "began on NVIDIA H200" in complained
    assert runner.begun() == ["one"]


def test_missing_build_requirements_are_named(tmp_path: Path) -> None:
    answer = tmp_path / "findings.json"
    subprocess.run(
        [sys.executable, "-S", "-m", "benchmarks.gpu.steps.build", "--json", str(answer)],
        cwd=ROOT,
        env={"PATH": "/nonexistent", "CXX": "no-such-compiler"},
        check=True,
        capture_output=True,
    )
    (said,) = findings.read(answer)[0]["checks"]
    assert not said["passed"]
    assert "no nanobind" in said["said"]
    assert "compiler" in said["said"]


SEGMENT_OF_A_STAND_IN = """
import posix_ipc, stat
from pathlib import Path
from kvelastic import errors
from kvelastic.shared import segment
assert Path(posix_ipc.__file__).parent.name == "stand_ins"
with segment.create("kvtest_stand_in", engine="test", device="cpu"):
    path = Path("/dev/shm/kvtest_stand_in")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    try:
        segment.create("kvtest_stand_in", engine="test", device="cpu")
    except errors.SegmentExistsError:
        print("refused")
assert not path.exists()
"""


def test_instances_run_without_posix_ipc() -> None:
    stand_ins = ROOT / "benchmarks" / "gpu" / "stand_ins"
    done = subprocess.run(
        [sys.executable, "-c", SEGMENT_OF_A_STAND_IN],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(stand_ins)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


@pytest.mark.slow
def test_failed_build_is_retried_by_the_next_part(tmp_path: Path) -> None:
    """Nothing else can run without it, and what was wrong may have been mended."""
    work = tmp_path / "work"
    failed = state.new("stem", simulated=True, quick=True)
    failed.steps["build"] = state.Outcome(state.FAILED, why="no compiler")
    failed.write(work / "simulated-quick" / "state.json")
    options = ["--simulated", "--quick", "--only", "device-names", "--work", str(work)]
    done = subprocess.run([ROOT / "scripts" / "gpu", *options], check=False, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert "build" not in state.load(work / "simulated-quick" / "state.json").steps


def decided(**figures: dict[str, object]) -> list[str]:
    run = state.new("stem", simulated=False, quick=False)
    for name, told in figures.items():
        found = {"figures": told}
        run.steps[name.replace("__", "-")] = state.Outcome(state.PASSED, findings=found)
    return decisions.lines(run)


def test_unmeasured_figures_decide_nothing() -> None:
    page_size, guard, recycled, *readme = decided()
    assert page_size == "Default page size: not measured; what attention asks for: not measured."
    assert "its price: not measured; reading ahead: not run" in guard
    assert recycled == "Recycled or cold: not measured."
    assert all("not measured" in line or "not run" in line for line in readme)


def test_measured_figures_decide() -> None:
    over_dense = {"2": 1.05, "8": 1.004, "16": 1.02, "64": 1.006, "128": 1.001}
    page_size, guard, recycled, *readme = decided(
        facts={"default_page_bytes": 64 << 20, "page_price_us": 135.2},
        attention={"attention_over_dense": over_dense},
        vmm__page_cycle={
            "recycled_over_bare": 1.31,
            "cold_over_recycled": 4.0,
            "guarded_over_recycled": 1.9,
        },
        limit={"acknowledged_p99_ms": 0.7},
        battery={},
    )
    assert "64 MiB at 135 us a page" in page_size
    assert "within 1 % of dense from 64 MiB on" in page_size, "16 MiB is not within it"
    assert "1.90 times as much" in guard
    assert "keep handles" in recycled
    assert any("1.31 of the bare calls (bar: 1.2, NOT met)" in line for line in readme)
    assert any("within 0.70 ms (p99) (bar: 5)" in line for line in readme)
    assert any("the contract of drivers holds: yes" in line for line in readme)


def test_malformed_findings_do_not_break_a_page() -> None:
    run = state.new("stem", simulated=False, quick=False)
    run.facts = {
        "device": "a GPU",
        "date": "",
        "commit": "",
        "machine": dict.fromkeys(("cpu", "cores", "memory", "kernel", "python"), ""),
    }
    outcome = run.steps["facts"] = state.Outcome()
    outcome.status, outcome.why, outcome.output = state.FAILED, "a | b\nc", "```\nend"
    outcome.findings = {
        "figures": {"page_price_us": "many"},
        "lines": [1, None],
        "checks": [{"name": "n", "passed": 0}],
        "tables": [{"title": "t", "headings": ["a"], "rows": [[1]], "notes": []}],
    }
    page = report.page(run)
    assert "| a / b c |" in page
    assert page.count("```") == 2
    assert "#### t" in page
