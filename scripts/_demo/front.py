"""The demo's last part: two models behind one address; a request wakes the sleeping one.

    with Front(folder, engine, first, model, (NAME, second_instance)) as front:
        front.wait_until_ready()
        front.ask("sun", "What is 2 + 3?", 16)

The first model already runs and is configured by its address. The controller launches, monitors and
stops the second one.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil
from client import RequestFailedError, ask
from engine_server import START_DEADLINE_S
from engines import DemoEngine, Server
from ports import free_port

FIRST, SECOND = "sun", "moon"
CONTROLLER = str(Path(sys.executable).with_name("kvelastic-controller"))
STOP_DEADLINE_S = 60.0
Self = TypeVar("Self", bound="Controller")


def settings_of(
    engine: DemoEngine,
    port: int,
    first_port: int,
    model: Path,
    instances: tuple[str, str],
    log: Path,
) -> dict[str, Any]:
    """Return the controller's configuration: a model running at `first_port`, and one to launch."""
    launch = engine.launch(model, log.parent)
    launch["env"] = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": instances[1],
        "HF_HUB_OFFLINE": "1",
        **launch.get("env", {}),
    }
    launch |= {
        "port": free_port(),
        "ready_timeout": START_DEADLINE_S,
        "log_file": str(log),
    }
    each = {"served_name": engine.model_name(model), **engine.kind}
    url = f"http://127.0.0.1:{first_port}"
    return {
        "server": {"port": port, "log_requests": False},
        "models": [
            {"name": FIRST, "url": url, "instance": instances[0], **each},
            {"name": SECOND, "launch": launch, "instance": instances[1], **each},
        ],
    }


class Controller:
    """The controller as a separate process."""

    def __init__(self, folder: Path, settings: dict[str, Any], port: int) -> None:
        """Start it in `folder`. `port` is the one that the settings name."""
        self.port = port
        self.config = folder / "controller.yaml"
        self.logs = [folder / "controller.log"]
        self.config.write_text(json.dumps(settings, indent=2))  # JSON is YAML too
        with self.logs[0].open("wb") as output:
            self.process = subprocess.Popen(
                [CONTROLLER, "--config", str(self.config)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until all models are awake. Raises RequestFailedError if one does not wake."""
        deadline = time.monotonic() + START_DEADLINE_S
        states: dict[str, str] = {}
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RequestFailedError(
                    f"the controller exited with code {self.process.returncode}"
                )
            try:
                states = self.states()
            except OSError:
                states = {}  # it does not listen yet
            if states and set(states.values()) == {"awake"}:
                return
            time.sleep(0.1)
        raise RequestFailedError(f"the models were not ready in time: {states}")

    def states(self) -> dict[str, str]:
        """Return each model's state: awake, asleep, starting, ..."""
        return {
            name: facts["state"] for name, facts in self.call("GET", "/models")["models"].items()
        }

    def ask(self, model: str, question: str, max_tokens: int) -> str:
        """Return a model's answer to a question. Raises the errors of `client.ask`."""
        return ask(self.port, question, max_tokens, model)

    def call(self, method: str, path: str) -> Any:
        """Call a route of the controller. Raises RequestFailedError for a status other than 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_DEADLINE_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RequestFailedError(f"{method} {path}: {response.status}: {text.decode()[:500]}")
        return json.loads(text)

    def pids(self) -> list[int]:
        """Return the ids of the controller and its descendants that still run."""
        try:
            controller = psutil.Process(self.process.pid)
            return [self.process.pid, *(c.pid for c in controller.children(recursive=True))]
        except psutil.Error:
            return []

    def log_end(self, lines: int) -> str:
        """Return the last lines of its logs."""
        parts = []
        for log in self.logs:
            if log.exists():
                text = log.read_text(errors="replace").splitlines()[-lines:]
                parts.append("\n".join([f"--- {log.name}:", *text]))
        return "\n".join(parts)

    def stop(self) -> int:
        """Send SIGTERM, which stops launched engines too; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_DEADLINE_S)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is not None:
            return
        started = [psutil.Process(pid) for pid in self.pids() if psutil.pid_exists(pid)]
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in psutil.wait_procs(started, STOP_DEADLINE_S)[1]:
            process.kill()


class Front(Controller):
    """The controller of two models, one of which it launches."""

    def __init__(
        self,
        folder: Path,
        engine: DemoEngine,
        first: Server,
        model: Path,
        instances: tuple[str, str],
    ) -> None:
        self.engine = engine
        port, log = free_port(), folder / "moon.log"
        settings = settings_of(engine, port, first.port, model, instances, log)
        super().__init__(folder, settings, port)
        self.logs.append(log)
