"""Engines that the controller starts, watches and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from running import FAKES, Controller, fake_launch
from waiting import DEADLINE_S, wait_until

from kvelastic.controller.app_state import AppState
from kvelastic.controller.http.log_writer import LogWriter
from kvelastic.controller.http.open_files import OpenFiles
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.request_log import RequestLog
from kvelastic.controller.launch.engine_process import STEADY_S, Restarts
from kvelastic.controller.models.gate import State, Ticket
from kvelastic.controller.settings.settings_file import parse

pytestmark = pytest.mark.slow


def launched(folder: Path, *more: str, **launch: Any) -> dict[str, Any]:
    settings = fake_launch(folder, *more, **{"backoff": "50ms", **launch})
    return {"models": [{"name": "m", "engine": "vllm", "launch": settings}]}


def pid_of(front: Controller) -> int | None:
    return front.get("/admin/models/m/logs").json()["pid"]


def test_requests_wait_for_a_starting_engine(tmp_path: Path) -> None:
    config = launched(tmp_path, "--slow-start-s=0.2")
    with Controller(config) as front:
        assert front.complete().status_code == 200
        logs = front.get("/admin/models/m/logs", params={"lines": 5}).json()
        assert [line for line in logs["lines"] if line.startswith("ready ")]
        assert os.getpgid(logs["pid"]) == logs["pid"]
        pid = logs["pid"]
        assert front.end() == 0
    assert not psutil.pid_exists(pid)


def test_stop_waits_for_engine_cleanup_processes(tmp_path: Path) -> None:
    """As Python's resource tracker: it hears no SIGTERM, and works once the engine has gone."""
    left = tmp_path / "shared_memory"
    left.touch()
    tracker = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " print('tracking', flush=True); sys.stdin.read(); time.sleep(0.1);"
        f" os.unlink({str(left)!r})"
    )
    engine = (
        "import os, subprocess, sys;"
        f" p = subprocess.Popen([sys.executable, '-c', {tracker!r}],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE);"
        " p.stdout.readline();"
        f" os.set_inheritable(p.stdin.fileno(), True);"
        f" os.execv(sys.executable, [sys.executable, {str(FAKES / 'engine.py')!r}, sys.argv[1]])"
    )
    command = [sys.executable, "-c", engine, "--port={port}"]
    with Controller(launched(tmp_path, command=command)) as front:
        assert front.complete().status_code == 200
        assert left.exists()
        assert front.end() == 0
        assert not left.exists()


def test_killed_engine_is_restarted(tmp_path: Path) -> None:
    with Controller(launched(tmp_path)) as front:
        assert front.complete().status_code == 200
        first = pid_of(front)
        assert first
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: pid_of(front) not in {None, first} and front.state() == "awake")
        assert front.complete().status_code == 200


@pytest.mark.parametrize("on_demand", [False, True])
def test_running_engine_with_a_closed_port_is_restarted(tmp_path: Path, on_demand: bool) -> None:
    """vLLM's server does that if its engine core is killed during a call: it waits for the call."""
    with Controller(launched(tmp_path, on_demand=on_demand)) as front:
        assert front.complete().status_code == 200
        first = pid_of(front)
        front.post("/upstream/m/fake/close_port")
        wait_until(lambda: "no longer accepts connections" in str(problem_of(front)))
        wait_until(lambda: front.complete().status_code == 200)
        assert pid_of(front) not in {None, first}
        assert first is not None
        assert not psutil.pid_exists(first)


def test_sleep_call_ends_when_the_port_closes(tmp_path: Path) -> None:
    config = launched(tmp_path) | {"sleep": {"sleep_timeout": "1h", "min_sleep": 0}}
    with Controller(config) as front, ThreadPoolExecutor() as threads:
        assert front.complete().status_code == 200
        first = pid_of(front)
        engine = f"http://127.0.0.1:{config['models'][0]['launch']['port']}"
        httpx.post(engine + "/fake/set", json={"sleep_hold": "until killed"})
        with httpx.Client(base_url=engine, timeout=DEADLINE_S) as client:
            sleep = threads.submit(front.post, "/action/sleep/m")
            wait_until(lambda: client.get("/fake/state").json()["held"])
            client.post("/fake/close_port")
        answer = sleep.result()
        assert answer.status_code == 503, answer.text
        assert "no longer accepts connections" in answer.text
        wait_until(lambda: pid_of(front) not in {None, first} and front.state() == "awake")
        assert front.complete().status_code == 200


def test_engine_failing_at_start_is_503_with_reason(tmp_path: Path) -> None:
    with Controller(launched(tmp_path, "--die=3", restart=False)) as front:
        wait_until(lambda: front.state() == "down")
        response = front.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_down")
        assert response.headers["retry-after"]
        assert "dying as told" in front.get("/admin/models/m/logs").json()["lines"]
        assert problem_of(front) == "launch: the engine ended with 3"


def test_missing_command_is_reported(tmp_path: Path) -> None:
    with Controller(launched(tmp_path, command=["/no/such/program"], restart=False)) as front:
        wait_until(lambda: front.state() == "down")
        assert front.complete().status_code == 503
        assert problem_of(front) == (
            "launch: cannot start: launch.command: '/no/such/program' cannot be run: No such file"
            " or directory"
        )


def test_missing_working_folder_is_reported(tmp_path: Path) -> None:
    with Controller(launched(tmp_path, cwd="/no/such/folder", restart=False)) as front:
        wait_until(lambda: front.state() == "down")
        assert problem_of(front) == (
            "launch: cannot start: launch.cwd /no/such/folder is not a folder"
        )


def problem_of(front: Controller) -> object:
    return front.get("/models").json()["models"]["m"]["last_problem"]


@pytest.mark.parametrize("on_demand", [False, True])
def test_unexpected_launch_error_is_reported(
    tmp_path: Path, on_demand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failed(*_: object, **__: object) -> None:
        raise ValueError("illegal environment variable name")

    async def serve() -> None:
        settings = parse(json.dumps(launched(tmp_path, on_demand=on_demand, restart=False)), {})
        with LogWriter(None) as writer:
            front = AppState(settings, RequestLog(writer), OpenFiles.raised())
            monkeypatch.setattr(asyncio, "create_subprocess_exec", failed)
            await front.start()
            model = front.fleet.need("m")
            while on_demand and model.state is not State.ASLEEP:
                await asyncio.sleep(0.01)
            if on_demand:
                with pytest.raises(Refusal) as refused:
                    await model.enter(Ticket())
                assert refused.value.code == "wake_failed"
            while model.state not in {State.DOWN, State.ASLEEP}:
                await asyncio.sleep(0.01)
            assert "illegal environment variable name" in str(model.last_problem)
            await front.stop()

    asyncio.run(asyncio.wait_for(serve(), DEADLINE_S))


def test_engine_exceeding_ready_timeout_is_restarted(tmp_path: Path) -> None:
    config = launched(tmp_path, "--slow-start-s=600", ready_timeout="200ms")
    with Controller(config) as front:
        wait_until(lambda: front.get("/admin/models/m/logs").json()["starts"] >= 3)


def test_engine_ignoring_sigterm_is_killed(tmp_path: Path) -> None:
    config = launched(tmp_path, "--deaf", stop_timeout="200ms")
    with Controller(config) as front:
        assert front.complete().status_code == 200
        pid = pid_of(front)
        assert pid
        assert front.end() == 0
    assert not psutil.pid_exists(pid)


def test_a_launched_engine_sleeps_and_wakes(tmp_path: Path) -> None:
    config = launched(tmp_path)
    with Controller(config) as front:
        assert front.complete().status_code == 200
        assert front.post("/action/sleep/m").json()["success"]
        port = config["models"][0]["launch"]["port"]
        assert httpx.get(f"http://127.0.0.1:{port}/is_sleeping").json()["is_sleeping"]
        assert front.complete().status_code == 200


def test_restart_delay_grows() -> None:
    restarts = Restarts(1.0, 10.0)
    assert [restarts.ended(0.0) for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert restarts.ended(STEADY_S) == 1


def test_log_file_replaced_by_fifo_does_not_block(tmp_path: Path) -> None:
    """Without a reader its `open` would wait for one, and the loop with it."""
    config = launched(tmp_path, "--die=3", restart=True)
    path = Path(config["models"][0]["launch"]["log_file"])
    with Controller(config) as front:
        wait_until(lambda: problem_of(front))
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        wait_until(lambda: "is a FIFO" in str(problem_of(front)))
        assert front.end() == 0
