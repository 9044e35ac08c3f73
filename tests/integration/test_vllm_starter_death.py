"""An engine core ends when the process that started it was killed; nothing of it stays."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from processes import PROGRAMS, LineProgram
from waiting import DEADLINE_S

from kvelastic.integration.vllm import end_with_starter

FOREVER_S = 10 * DEADLINE_S


class StartedCore(LineProgram):
    """`core` and `worker` are what must end; `others` is what a starter may have besides."""

    def __init__(self, log: Path, method: str, *, ends: str, grace_s: float) -> None:
        super().__init__(PROGRAMS / "started_core.py", method, ends, str(grace_s), log=log)
        self.core, self.worker, *self.others = map(psutil.Process, json.loads(self.read()))

    def wait_until_gone(self) -> None:
        _, alive = psutil.wait_procs([self.core, self.worker], timeout=DEADLINE_S)
        assert not alive

    def __exit__(self, *_: object) -> None:
        self.kill()
        for process in (self.core, self.worker, *self.others):
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_core_closes_in_order_after_its_starter_dies(method: str, log: Path) -> None:
    with StartedCore(log, method, ends="orderly", grace_s=FOREVER_S) as started:
        assert started.ask("here?") == "here?", "the thread that started it has ended, no more"
        started.kill()
        started.wait_until_gone()
        # A sibling has inherited the starter's end of every pipe.
        assert all(other.is_running() for other in started.others)
        assert "closed" in log.read_text()


def test_stuck_core_is_killed_with_its_workers(log: Path) -> None:
    with StartedCore(log, "spawn", ends="stuck", grace_s=0.01) as started:
        started.kill()
        started.wait_until_gone()


def test_core_that_never_finalizes_is_killed(log: Path) -> None:
    with StartedCore(log, "spawn", ends="finalizing", grace_s=3.0) as started:
        started.kill()
        started.wait_until_gone()
        assert "closed" in log.read_text(), "it has reached its finalization"


def test_stopped_starter_does_not_count_as_ended(log: Path) -> None:
    with StartedCore(log, "fork", ends="orderly", grace_s=FOREVER_S) as started:
        started.stop()
        started.go_on()
        assert started.ask("here?") == "here?"


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_starter_dead_before_the_check_counts(method: str, log: Path) -> None:
    with StartedCore(log, method, ends="late", grace_s=FOREVER_S) as started:
        started.kill()
        started.wait_until_gone()
        assert "closed" in log.read_text()


class Starter(NamedTuple):
    pid: int

    def join(self) -> None:
        raise AssertionError("a sibling may hold the pipe on which this waits")


class SlowExit:
    """A poll of the pidfd of a process that has lost its children, and dies after any timeout."""

    def register(self, *_: object) -> None: ...

    def poll(self, timeout_ms: int | None = None) -> list[int]:
        return [] if timeout_ms is not None else [1]


def test_slowly_dying_starter_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_with_starter.os, "getppid", lambda: 0)
    monkeypatch.setattr(end_with_starter.select, "poll", SlowExit)
    end_with_starter._wait_for_end_of(Starter(pid=1))


def test_younger_process_with_the_pid_is_no_starter() -> None:
    with subprocess.Popen(["sleep", "1000"]) as younger:
        try:
            end_with_starter._wait_for_end_of(Starter(younger.pid))
        finally:
            younger.kill()


def test_grace_period_follows_start_and_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_with_starter, "_has_started", False)
    monkeypatch.setenv("KVELASTIC_TIERS", "host:64M")
    monkeypatch.setenv("KVELASTIC_TIER_EXIT_SECONDS", "60")
    assert end_with_starter._grace_now_s() == 3.0, "it goes on to load, and has nothing to keep"
    end_with_starter.note_start()
    assert end_with_starter._grace_now_s() == 75.0
    monkeypatch.setenv("KVELASTIC_TIERS", "none")
    assert end_with_starter._grace_now_s() == 15.0
