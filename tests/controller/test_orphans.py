"""Engines whose controller was killed, and other programs on an engine's port."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ports import free_port
from running import FAKES, Controller, Engine
from test_launch import launched, pid_of
from waiting import DEADLINE_S, wait_until

from kvelastic.controller.launch import launch_record
from kvelastic.controller.launch.launch_record import LaunchedEngine, Mark, Record
from kvelastic.shared.liveness import ProcessIdentity

pytestmark = pytest.mark.slow


ORPHAN = "--outlives-its-parent"


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Records of this test's engines only, all of which end with it."""
    forkserver.ensure_running()  # before TMPDIR is set, or it would end with the first test
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield tmp_path / f"kvelastic-controller-{os.geteuid()}"
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("TMPDIR") == str(tmp_path):
                process.kill()
                left.append(process)
    psutil.wait_procs(left, DEADLINE_S)


def port_of(config: dict[str, Any]) -> int:
    return config["models"][0]["launch"]["port"]


def engine_of(front: Controller) -> int:
    """Its process, once it serves."""
    assert front.complete().status_code == 200
    pid = pid_of(front)
    assert pid
    return pid


@contextlib.contextmanager
def orphaned_engine(config: dict[str, Any], folder: Path | None = None) -> Iterator[int]:
    """The process of an engine whose controller was killed."""
    with Controller(config, folder=folder) as front:
        pid = engine_of(front)
        front.end(signal.SIGKILL)
    assert is_running(pid)
    yield pid


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_orphan_is_ended_before_a_new_engine_starts(tmp_path: Path) -> None:
    config = launched(tmp_path, ORPHAN)
    with orphaned_engine(config) as orphan, Controller(config) as front:
        pid = engine_of(front)
        assert pid != orphan
        assert not is_running(orphan)
        front.wait_for_line("ends an engine that a controller has left behind")
        assert front.end() == 0
        assert not is_running(pid)


def test_orphan_is_adopted_if_configured(tmp_path: Path, records: Path) -> None:
    config = launched(tmp_path, ORPHAN, orphan="adopt")
    with orphaned_engine(config) as orphan:
        for _ in range(2):  # adopted, left behind again
            with Controller(config) as front:
                assert engine_of(front) == orphan
                front.wait_for_line(f"adopts process {orphan}")
                front.post("/action/sleep/m")
                front.end(signal.SIGKILL)
        with Controller(config) as front:
            assert engine_of(front) == orphan  # asleep when it was found, and woken
            os.kill(orphan, signal.SIGKILL)
            wait_until(lambda: pid_of(front) not in {None, orphan})
            front.wait_for_line("which was adopted, ended")
            assert engine_of(front) != orphan
            assert front.end() == 0
    assert not list(records.glob("engine-*"))


def test_adopted_engine_ends_with_its_controller(tmp_path: Path) -> None:
    config = launched(tmp_path, ORPHAN, orphan="adopt")
    with orphaned_engine(config) as orphan, Controller(config) as front:
        assert engine_of(front) == orphan
        assert front.end() == 0
        assert not is_running(orphan)


def test_on_demand_orphan_is_ended_if_port_taken(tmp_path: Path) -> None:
    """Its controller was killed before it listened."""
    config = launched(tmp_path, ORPHAN, "--slow-start-s=600", orphan="adopt", on_demand=True)
    with Controller(config) as front, contextlib.closing(socket.socket()) as client:
        wait_until(lambda: front.state() == "asleep")
        client.connect(("127.0.0.1", front.port))
        client.sendall(b"POST /action/wakeup/m HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: pid_of(front) is not None)
        orphan = pid_of(front)
        assert orphan
        front.end(signal.SIGKILL)
    with Engine("vllm", "m", port_of(config)), Controller(config) as front:
        wait_until(lambda: front.state() == "asleep")
        assert "is taken by" in front.get("/models").json()["models"]["m"]["last_problem"]
        assert not is_running(orphan)
        assert front.end() == 0


def test_orphan_with_different_launch_settings_is_not_adopted(tmp_path: Path) -> None:
    config = launched(tmp_path, ORPHAN, orphan="adopt")
    with orphaned_engine(config) as orphan:
        config["models"][0]["launch"]["env"] = {"ANYTHING": "else"}
        with Controller(config) as front:
            assert engine_of(front) != orphan
            assert not is_running(orphan)


@pytest.mark.parametrize("lost", ["record", "mark"])
def test_orphan_is_found_by_record_or_mark_alone(tmp_path: Path, records: Path, lost: str) -> None:
    config = launched(tmp_path, ORPHAN)
    if lost == "mark":  # as by a program that writes over its environment
        command = config["models"][0]["launch"]["command"]
        config["models"][0]["launch"]["command"] = ["env", "-u", "KVELASTIC_LAUNCHED_BY", *command]
    with orphaned_engine(config) as orphan:
        [path] = records.glob("engine-*")
        assert path.stat().st_mode & 0o777 == 0o600
        if lost == "record":
            path.unlink()
        with Controller(config) as front:
            assert engine_of(front) != orphan
            assert not is_running(orphan)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_in_separate_sessions_end_with_their_engine(
    tmp_path: Path, how: signal.Signals
) -> None:
    worker = tmp_path / "worker"
    fake = f"{sys.executable} {FAKES / 'engine.py'} {ORPHAN}"
    shell = f"setsid {fake} --port=0 & echo $! > {worker}; exec {fake} --port={{port}} --model=m"
    config = launched(tmp_path, command=["sh", "-c", shell])
    with Controller(config) as front:
        engine = engine_of(front)
        pid = int(worker.read_text())
        wait_until(lambda: os.getsid(pid) == pid)
        if how == signal.SIGTERM:
            assert front.end() == 0
            assert not is_running(pid)
            return
        front.end(how)
    os.kill(engine, signal.SIGKILL)  # the worker is all there is left
    wait_until(lambda: not is_running(engine))
    with Controller(config) as front:
        assert engine_of(front) != engine
        wait_until(lambda: not is_running(pid))
        assert front.end() == 0
    assert not is_running(int(worker.read_text()))


def test_orphan_of_an_unconfigured_model_is_ended(tmp_path: Path) -> None:
    config = launched(tmp_path, ORPHAN)
    with orphaned_engine(config, tmp_path) as orphan:
        with Controller({"models": []}):  # of another file
            assert is_running(orphan)
        with Controller({"models": []}, folder=tmp_path):
            wait_until(lambda: not is_running(orphan))


def test_engine_of_a_running_controller_is_left_alone(tmp_path: Path) -> None:
    config = launched(tmp_path, ORPHAN)
    with Controller(config) as first:
        pid = engine_of(first)
        with Controller(config) as second:
            problem = f"port {port_of(config)} is taken by process {pid}"
            second.wait_for_line(problem)
            assert second.complete().status_code == 503
            assert second.end() == 0
        assert engine_of(first) == pid


def test_launch_waits_for_port_and_names_its_process(tmp_path: Path) -> None:
    config = launched(tmp_path)
    with Engine("vllm", "m", port_of(config)) as foreign, Controller(config) as front:
        problem = f"port {port_of(config)} is taken by process {foreign.process.pid}"
        wait_until(lambda: problem in str(front.get("/models").json()["models"]["m"]))
        assert front.complete().status_code == 503
        assert foreign.count("requests") == 0
        foreign.end()
        wait_until(lambda: front.state() == "awake")
        assert engine_of(front)
        assert front.get("/models").json()["models"]["m"]["last_problem"] is None


def test_other_process_on_port_receives_no_requests(tmp_path: Path) -> None:
    """The launched one lives, and listens nowhere: its health is asked of the foreign."""
    fake = [sys.executable, str(FAKES / "engine.py"), "--port=0"]
    config = launched(tmp_path, command=fake, restart=False)
    with Controller(config) as front:
        wait_until(lambda: front.get("/admin/models/m/logs").json()["starts"] == 1)
        with Engine("vllm", "m", port_of(config)) as foreign:
            wait_until(lambda: front.state() == "down")
            front.wait_for_line(f"is taken by process {foreign.process.pid}")
            assert front.complete().status_code == 503
            assert foreign.count("requests") == 0


def test_engine_listening_on_all_interfaces_is_reported(tmp_path: Path) -> None:
    with Controller(launched(tmp_path, "--host=0.0.0.0")) as front:
        assert engine_of(front)
        front.wait_for_line("the engine listens on all interfaces")


# ------------------------------------------------------------------------- records from others


def record_of(pid: int, port: int = 9000) -> Record:
    me = ProcessIdentity.of_this_process()
    gone = dataclasses.replace(me, start_time_ticks=me.start_time_ticks + 1)
    return Record.of(Mark("file", "m", port, "digest", gone), pid)


def engines_of_record_files() -> list[LaunchedEngine]:
    return [engine for engine in launch_record.find_engines() if engine.mark.source == "file"]


def test_record_does_not_match_a_reused_pid(records: Path) -> None:
    with Engine() as process:
        record = record_of(process.process.pid)
        launch_record.write(record)
        [found] = engines_of_record_files()
        assert (found.leader, found.is_orphan) == (record.leader, True)
        before = dataclasses.replace(
            record.leader, start_time_ticks=record.leader.start_time_ticks - 1
        )
        launch_record.write(Record(record.mark, before))
        assert engines_of_record_files() == []
        assert not list(records.glob("engine-*"))  # of one that has ended


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", '{"mark": 1}', '{"mark": "{}", "leader": 1}', "[" * 60000],
    ids=range(7),
)
def test_invalid_record_files_are_ignored(records: Path, text: str) -> None:
    launch_record.make_folder()
    (records / "engine-1-9000.json").write_text(text)
    (records / "engine-1-9001.json").symlink_to("/etc/passwd")
    os.mkfifo(records / "engine-1-9002.json")
    assert engines_of_record_files() == []
    assert Mark.from_text(text) is None


def test_records_in_a_world_writable_folder_are_ignored(records: Path) -> None:
    with Engine() as process:
        launch_record.write(record_of(process.process.pid))
        records.chmod(0o777)
        assert engines_of_record_files() == []


# ------------------------------------------------------------------------------------- at length


@pytest.mark.parametrize(
    "lives", [5, pytest.param(500, marks=pytest.mark.soak)], ids=["short", "minutes"]
)
@pytest.mark.timeout(1800)
def test_random_kills_and_reloads_leave_no_orphans(lives: int, tmp_path: Path) -> None:
    """Two models; their controller is killed, ended, reloaded, their engines are killed."""
    dice = random.Random(11)
    done: dict[str, int] = {}
    ports = {"a": free_port(), "b": free_port()}

    def config(generation: int) -> dict[str, Any]:
        models = []
        for name, port in ports.items():
            command = [sys.executable, str(FAKES / "engine.py"), "--port={port}", ORPHAN]
            launch = {
                "command": [*command, f"--model={name}"],
                "port": port,
                "backoff": "50ms",
                "log_file": str(tmp_path / f"{name}.log"),
                "orphan": dice.choice(["end", "adopt"]),
                "env": {"GENERATION": str(generation if dice.random() < 0.3 else 0)},
            }
            models.append({"name": name, "engine": "vllm", "launch": launch})
        return {"models": models, "sleep": {"min_sleep": 0}}

    def engines() -> list[int]:
        """Those of this test: others may run at the same time."""
        return [
            process.pid
            for process in psutil.process_iter(["cmdline", "environ"])
            if str(FAKES / "engine.py") in (process.info["cmdline"] or ())
            and (process.info["environ"] or {}).get("TMPDIR") == str(tmp_path)
        ]

    def is_answered(front: Controller, name: str) -> bool:
        answer = front.complete(name)
        if answer.status_code != 200:
            return False
        assert answer.json()["model"] == name
        return True

    def pid_of(front: Controller, name: str) -> int | None:
        """The engine that the controller has launched or adopted; None: not at the moment."""
        return front.get(f"/admin/models/{name}/logs").json().get("pid")

    def pid_at(port: int) -> int:
        with contextlib.suppress(httpx.HTTPError):
            pid: int = httpx.get(f"http://127.0.0.1:{port}/fake/state").json()["pid"]
            return pid
        return -1

    def is_of_the_controller(front: Controller, name: str, port: int) -> bool:
        return pid_of(front, name) == pid_at(port)

    def check(front: Controller) -> None:
        """Each model is answered by its own engine, the only one on its port."""
        for name, port in ports.items():
            wait_until(partial(is_answered, front, name))
            # A reload that is still under way may give it another engine in between.
            wait_until(partial(is_of_the_controller, front, name, port))
        wait_until(lambda: len(engines()) == 2)

    generation = 0
    for _ in range(lives):
        generation += 1
        with Controller(config(generation), folder=tmp_path) as front:
            for _ in range(dice.randint(0, 3)):
                event = dice.choice(["reload", "engine", "answer", "stop"])
                done[event] = done.get(event, 0) + 1
                if event == "answer":
                    check(front)
                elif event == "reload":
                    generation += 1
                    front.write(config(generation))
                    front.send(signal.SIGHUP)
                else:
                    for pid in engines()[:1]:
                        number = signal.SIGKILL if event == "engine" else signal.SIGSTOP
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, number)
                            if event == "stop":
                                os.kill(pid, signal.SIGCONT)
            how = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            done[how.name] = done.get(how.name, 0) + 1
            front.end(how)
            if how == signal.SIGTERM:
                assert engines() == []
    with Controller(config(generation), folder=tmp_path) as front:
        check(front)
        assert not [line for line in front.lines if "Traceback" in line]
        assert front.end() == 0
    assert engines() == []
    print(f"{generation} configurations: {done}")
