"""`transformers serve` in its own process group, for the demo."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from client import ask
from engine_server import own_environment
from killed_engines import kill_group
from ports import free_port

START_DEADLINE_S = 240.0
STOP_DEADLINE_S = 60.0
BLOCK_TOKENS = 32


def command_of(model: Path, port: str, blocks: int) -> list[str]:
    """Return the command that starts a server. `port` may be a controller's `{port}`."""
    program = str(Path(sys.executable).with_name("transformers"))
    return [
        program, "serve", str(model), "--continuous-batching", "--device", "cpu",
        "--dtype", "float32", "--host", "127.0.0.1", "--port", port,
        "--cb-block-size", str(BLOCK_TOKENS), "--cb-num-blocks", str(blocks),
    ]  # fmt: skip


class TransformersServer:
    """A server that runs until `stop` or `kill`. Its output is in `log`."""

    def __init__(self, model: Path, log: Path, environment: Mapping[str, str], blocks: int) -> None:
        self.log = log
        self.port = free_port()
        self._model = model
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command_of(model, str(self.port), blocks),
                env={**own_environment(), "HF_HUB_OFFLINE": "1", **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until the server has served a request, because the first one makes its cache."""
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"transformers serve ended with {self.process.returncode}")
            try:
                ask(self.port, "Hello.", 1, str(self._model))
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)  # it does not listen yet
            else:
                return
        raise AssertionError(f"transformers serve was not ready in {START_DEADLINE_S:g} s")

    def stop(self) -> int:
        """Send SIGTERM, as an operator would; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_DEADLINE_S)

    def kill(self) -> None:
        """Send SIGKILL to every process of the server. Safe at any time."""
        kill_group(self.process)
