"""Programs that the controller's tests run: fake engines and the controller itself, with clients.

with Engine() as engine, Controller(config_for(engine)) as front:
    assert front.post("/v1/completions", {"model": "m", "prompt": "x"}).status_code == 200
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml
from forked import FAKES, Forked
from ports import free_port
from waiting import DEADLINE_S

from kvelastic.controller.app_state import AppState
from kvelastic.controller.http.log_writer import LogWriter
from kvelastic.controller.http.open_files import OpenFiles
from kvelastic.controller.http.request_log import RequestLog
from kvelastic.controller.settings.settings_file import parse

Self = TypeVar("Self", bound="Program")


def start(*command: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a program that dies with the test run; so the thread that starts it is to live on."""
    return subprocess.Popen(
        [sys.executable, "-S", str(FAKES / "mortal.py"), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def rest_of(sock: socket.socket) -> bytes:
    """What comes until the other end closes."""
    return b"".join(iter(lambda: sock.recv(1 << 20), b""))


def fake_launch(folder: Path, *more: str, **settings: Any) -> dict[str, Any]:
    """A model's `launch`: the controller starts a fake engine with these arguments."""
    return {
        "command": [sys.executable, str(FAKES / "engine.py"), "--port={port}", *more],
        "port": free_port(),
        "log_file": str(folder / "engine.log"),
        **settings,
    }


class Program:
    """A process whose output is read on, so that it never blocks on a full pipe."""

    def __init__(self, process: subprocess.Popen[str] | Forked) -> None:
        self.process = process
        self.lines: deque[str] = deque(maxlen=5000)
        self._grown = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grown:
                self.lines.append(line.rstrip("\n"))
                self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    def wait_for_line(self, part: str, timeout_s: float = DEADLINE_S) -> str:
        """The first line that has `part` in it; an assertion fails if none comes."""

        def found() -> str | None:
            return next((line for line in list(self.lines) if part in line), None)

        with self._grown:
            self._grown.wait_for(lambda: found() is not None or self._ended, timeout_s)
            line = found()
        assert line is not None, f"no {part!r} in:\n" + "\n".join(self.lines)
        return line

    def started(self, part: str) -> str:
        """As `wait_for_line`, for the line of a start; without it the program is ended."""
        try:
            return self.wait_for_line(part)
        except BaseException:
            self.end(signal.SIGKILL)
            raise

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = DEADLINE_S) -> int:
        """Send a signal and wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Until it has ended by itself, or by a signal sent before; returns the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._reader.join(DEADLINE_S)
            assert self.process.stdout is not None
            self.process.stdout.close()
        return code

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)
        else:
            self.end()


class Engine(Program):
    """A fake engine."""

    def __init__(self, kind: str = "vllm", model: str = "m", port: int = 0, *more: str) -> None:
        arguments = [f"--kind={kind}", f"--model={model}", f"--port={port}", *more]
        super().__init__(Forked("engine", arguments, os.environ))
        self.kind, self.model = kind, model
        self.port = int(self.started("ready ").split()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def state(self) -> dict[str, Any]:
        return httpx.get(self.url + "/fake/state", timeout=DEADLINE_S).json()

    def count(self, what: str) -> int:
        return self.state()["counts"].get(what, 0)

    def change(self, **settings: Any) -> None:
        httpx.post(self.url + "/fake/set", json=settings, timeout=DEADLINE_S).raise_for_status()

    def reset(self) -> None:
        httpx.post(self.url + "/fake/reset", timeout=DEADLINE_S).raise_for_status()

    def release(self, name: str) -> None:
        httpx.post(
            self.url + "/fake/release", params={"name": name}, timeout=DEADLINE_S
        ).raise_for_status()


class Controller(Program):
    """The controller, on a port of its own choice.

    Its configuration file is in `folder`, where that is given, and stays there. `open_files`: its
    soft and its hard limit when it starts.
    """

    def __init__(
        self,
        config: dict[str, Any],
        open_files: tuple[int, int] | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="kvelastic-test-")
        self.path = (folder or Path(self.directory.name)) / "controller.yaml"
        self.first_config = config
        self.write(config)
        arguments = ["--config", str(self.path)]
        environ = os.environ | dict(environment or {})
        if open_files is None:
            super().__init__(Forked("controller", arguments, environ))
        else:
            limits = "ulimit -S -n {}; ulimit -H -n {}".format(*open_files)
            command = ["/bin/sh", "-c", f'{limits}; exec "$@"', "sh", sys.executable, "-m"]
            super().__init__(
                start(*command, "kvelastic.controller", *arguments, environment=environ)
            )
        line = json.loads(self.started("listening on"))
        self.port = int(line["message"].rsplit(" ", 1)[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def write(self, config: dict[str, Any]) -> None:
        """The configuration file; `send` or /admin/reload has it read."""
        config = {**config, "server": {"port": 0, **config.get("server", {})}}
        self.path.write_text(yaml.safe_dump(config))

    @contextlib.contextmanager
    def reloaded(self, config: dict[str, Any]) -> Iterator[None]:
        """Run the body with another configuration; the first one is read again after it."""
        self._reload(config)
        try:
            yield
        finally:
            self._reload(self.first_config)

    def _reload(self, config: dict[str, Any]) -> None:
        self.write(config)
        answer = self.post("/admin/reload")
        assert answer.json()["needs_restart"] == [], answer.text

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def complete(self, model: str = "m", **more: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": model, "prompt": "x", **more})

    def state(self, model: str = "m") -> str:
        return self.get("/models").json()["models"][model]["state"]

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        try:
            return super().wait(timeout_s)
        finally:
            if hasattr(self, "client"):
                self.client.close()
            self.directory.cleanup()


def config_for(*engines: Engine, **sections: Any) -> dict[str, Any]:
    """A configuration with a model for each engine; keyword arguments are its other sections."""
    more = sections.pop("model", {})
    models = [{"name": e.model, "engine": e.kind, "url": e.url, **more} for e in engines]
    sections.setdefault("sleep", {"min_sleep": 0})
    return {"models": models, **sections}


@contextlib.asynccontextmanager
async def app_state(
    config: dict[str, Any], after_reload: dict[str, Any] | None = None
) -> AsyncIterator[AppState]:
    """A controller in this event loop, without its HTTP server; `after_reload` is read then."""
    settings, new = (parse(json.dumps(each or {}), {}) for each in (config, after_reload))
    with LogWriter(None) as writer:
        state = AppState(
            settings, RequestLog(writer), OpenFiles.raised(), read_settings=lambda: new
        )
        await state.start()
        try:
            yield state
        finally:
            await state.stop()
