"""Programs that the controller's tests run: fake engines and the controller itself, with clients.

with Engine() as engine, Controller(config_for(engine)) as front:
    assert front.post("/v1/completions", {"model": "m", "prompt": "x"}).status_code == 200
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml
from waiting import DEADLINE_S

FAKES = Path(__file__).parent.parent / "fakes"

Self = TypeVar("Self", bound="Program")


class Program:
    """A process whose output is read on, so that it never blocks on a full pipe.

    It dies with the test run, so make it in a thread that does not end before.
    """

    def __init__(self, *command: str, environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(FAKES / "mortal.py"), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | dict(environment or {}),
        )
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
        super().__init__(
            sys.executable,
            str(FAKES / "engine.py"),
            f"--kind={kind}",
            f"--model={model}",
            f"--port={port}",
            *more,
        )
        self.kind, self.model = kind, model
        self.port = int(self.wait_for_line("ready ").split()[1])
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
        self.write(config)
        command = [sys.executable, "-m", "kvelastic.controller", "--config", str(self.path)]
        if open_files is not None:
            limits = "ulimit -S -n {}; ulimit -H -n {}".format(*open_files)
            command = ["/bin/sh", "-c", f'{limits}; exec "$@"', "sh", *command]
        super().__init__(*command, environment=environment)
        line = json.loads(self.wait_for_line("listening on"))
        self.port = int(line["message"].rsplit(" ", 1)[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def write(self, config: dict[str, Any]) -> None:
        """The configuration file; `send` or /admin/reload has it read."""
        config = {**config, "server": {"port": 0, **config.get("server", {})}}
        self.path.write_text(yaml.safe_dump(config))

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
