"""A run of the tests says what it skips, and fails where it leaves something behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import killed_engines
import psutil
import pytest
import run_end
from waiting import DEADLINE_S, wait_until

TESTS = Path(__file__).parents[1]
NAME = f"kvelastic_left_by_{os.getpid()}"
LEAVES = f"""
import pathlib, run_end, subprocess
run_end.ENDING_S = 0.2
pathlib.Path("/dev/shm/{NAME}").touch()
sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("pid", sleeper.pid)
"""
ENDS = {
    "passes": ("def test_a(): pass", 1),
    "fails, and is the last with -x": ("def test_a(): assert 0\ndef test_b(): pass", 1),
    "is interrupted": ("def test_a(): raise KeyboardInterrupt", 2),
    "is deselected": ("def test_b(): pass", 1),
}


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_pytest(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a run of its own, with this folder's conftest."""
    (folder / "test_inner.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-s"]
    return subprocess.run(
        [*command, "--rootdir", folder, folder / "test_inner.py", *arguments],
        env=os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS / 'programs'}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_leftovers_fail_the_run(end, tmp_path):
    source, status = ENDS[end]
    try:
        done = run_pytest(tmp_path, LEAVES + source, "-x", "-k", "test_a")
    finally:
        (run_end.SHM / NAME).unlink(missing_ok=True)
    assert done.returncode == status, done.stdout
    assert f"file /dev/shm/{NAME}" in done.stdout
    assert "now killed: sleep 1000" in done.stdout
    pid = int(done.stdout.split("pid ")[1].split()[0])
    wait_until(lambda: is_gone(pid), "it is not killed")


@pytest.mark.slow
def test_run_without_leftovers_passes(tmp_path):
    done = run_pytest(tmp_path, "def test_a(): pass")
    assert done.returncode == 0, done.stdout
    assert "left behind" not in done.stdout


@pytest.fixture
def traces(monkeypatch):
    monkeypatch.setenv(run_end.MARK, os.environ[run_end.MARK])
    monkeypatch.setenv("SPT_NOENV", "1")
    return run_end.Traces()


def test_foreign_files_and_processes_are_not_reported(traces):
    """Their files have the names that ours have; their processes are alive."""
    unmarked = {name: value for name, value in os.environ.items() if name != run_end.MARK}
    names = [NAME, f"psm_{os.getpid()}"]
    script = 'for f in "$@"; do exec 3<>/dev/shm/$f; tail -f <&3 >/dev/null & echo $!; done'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *names], env=unmarked, stdout=subprocess.PIPE, text=True
    )
    pids = [int(word) for word in done.stdout.split()]
    try:
        traces.look()
        assert traces.files() == []
        assert not {process.pid for process in traces.processes()} & set(pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for name in names:
            (run_end.SHM / name).unlink()


def test_file_used_by_a_process_is_the_runs(traces):
    path = run_end.SHM / f"psm_{os.getpid()}"
    with path.open("w") as file, subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file):
        traces.look()
    assert traces.files() == [path.name]
    path.unlink()
    assert traces.files() == []


@pytest.mark.slow
def test_skipped_tests_and_reasons_are_printed_first(tmp_path):
    source = """
import needs, pytest
@needs.gpu
@pytest.mark.parametrize("case", range(3))
def test_a(case): pass
@needs.no_gpu
def test_b(): pass
"""
    done = run_pytest(tmp_path, source)
    said = [line for line in done.stdout.splitlines() if line.startswith("will skip")]
    assert said in (
        ["will skip 1: there is a GPU"],
        ["will skip 3: no NVIDIA driver: no nvidia-smi"],
    )


MAKES_A_SEMAPHORE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(1000)
"""


def test_semaphores_of_a_killed_engine_are_removed():
    """Python's helper, which would remove them, is killed with it; maps call them deleted."""
    engine = subprocess.Popen(
        [sys.executable, "-c", MAKES_A_SEMAPHORE],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert engine.stdout is not None
    with engine.stdout:
        name = engine.stdout.readline().decode().strip().removeprefix("/")
        file = run_end.SHM / f"sem.{name}"
        assert file.exists()
        killed_engines.kill_group(engine)
    assert not file.exists()
