"""The demo's last part: two models behind one address, one of them asleep and woken by a request.

    with Front(folder, first, model, NAME, second_instance) as front:
        front.wait_until_ready()
        front.ask("sun", "What is 2 + 3?", 16)

The first model runs already and is named by its address; the second one is launched, watched and
ended by the controller.
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
from typing import Any

import psutil
from client import RequestFailedError, ask
from vllm_server import START_DEADLINE_S, VLLM, VllmServer, free_port

FIRST, SECOND = "sun", "moon"
CONTROLLER = str(Path(sys.executable).with_name("kvelastic-controller"))
STOP_DEADLINE_S = 60.0


class Front:
    """The controller as a program of its own."""

    def __init__(
        self, folder: Path, first: VllmServer, model: Path, instances: tuple[str, str]
    ) -> None:
        self.port = free_port()
        self.config = folder / "controller.yaml"
        self.log = folder / "controller.log"
        self._engine_log = folder / "moon.log"
        # JSON is YAML too.
        self.config.write_text(json.dumps(self._settings(first, model, instances), indent=2))
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [CONTROLLER, "--config", str(self.config)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _settings(
        self, first: VllmServer, model: Path, instances: tuple[str, str]
    ) -> dict[str, Any]:
        command = [
            str(VLLM), "serve", str(model), "--served-model-name", "m", "--dtype", "float32",
            "--host", "127.0.0.1", "--port", "{port}", "--enforce-eager",
            "--max-model-len", "1024", "--max-num-seqs", "16", "--block-size", "32",
            "--kv-cache-memory-bytes", str(256 << 20),
        ]  # fmt: skip
        launch = {
            "command": command,
            "port": free_port(),
            "env": {
                "ENABLE_KVELASTIC": "true",
                "KVELASTIC_IPC_NAME": instances[1],
                "VLLM_SERVER_DEV_MODE": "1",  # vLLM has /sleep and /wake_up only then
                "VLLM_RPC_BASE_PATH": str(self.config.parent),
                "VLLM_CPU_CI_ENV": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            },
            "ready_timeout": START_DEADLINE_S,
            "log_file": str(self._engine_log),
        }
        each = {"engine": "vllm", "served_name": "m"}
        return {
            "server": {"port": self.port, "log_requests": False},
            "models": [
                {
                    "name": FIRST,
                    "url": f"http://127.0.0.1:{first.port}",
                    "instance": instances[0],
                    **each,
                },
                {"name": SECOND, "launch": launch, "instance": instances[1], **each},
            ],
        }

    def wait_until_ready(self) -> None:
        """Until both models are awake. Raises RequestFailedError where one does not become so."""
        deadline = time.monotonic() + START_DEADLINE_S
        states: dict[str, str] = {}
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RequestFailedError(f"the controller ended with {self.process.returncode}")
            try:
                states = self.states()
            except OSError:
                states = {}  # it does not listen yet
            if states and set(states.values()) == {"awake"}:
                return
            time.sleep(0.1)
        raise RequestFailedError(f"the models were not ready in time: {states}")

    def states(self) -> dict[str, str]:
        """Of each model: awake, asleep, starting, ..."""
        return {
            name: facts["state"] for name, facts in self.call("GET", "/models")["models"].items()
        }

    def ask(self, model: str, question: str, max_tokens: int) -> str:
        """The same as to an engine, with the model's name."""
        return ask(self.port, question, max_tokens, model)

    def call(self, method: str, path: str) -> Any:
        """A route of the controller. Raises RequestFailedError for another status than 200."""
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
        """The controller and every process that it started, as far as they still run."""
        try:
            controller = psutil.Process(self.process.pid)
            return [self.process.pid, *(c.pid for c in controller.children(recursive=True))]
        except psutil.Error:
            return []

    def log_end(self, lines: int) -> str:
        """The last lines of the controller's log and of the engine's that it launched."""
        parts = []
        for log in (self.log, self._engine_log):
            if log.exists():
                text = log.read_text(errors="replace").splitlines()[-lines:]
                parts.append("\n".join([f"--- {log.name}:", *text]))
        return "\n".join(parts)

    def stop(self) -> int:
        """SIGTERM: it ends what it launched, and itself; answers its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_DEADLINE_S)

    def __enter__(self) -> Front:
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
