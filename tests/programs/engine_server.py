"""A real engine's server in a process group of its own: how it starts, is asked and ends.

`VllmServer` and `SglangServer` know what is theirs alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
from killed_engines import LeftBehind
from waiting import DEADLINE_S

START_DEADLINE_S = 420.0
"""20 to 40 s where the machine has what the engine imports in memory; minutes where it reads it."""
REQUEST_DEADLINE_S = DEADLINE_S
DECIDED = 1e-4
"""Of log probabilities: the tiny model's logits are known to a millionth or so."""

Self = TypeVar("Self", bound="EngineServer")


class Request(NamedTuple):
    prompt: list[int]
    max_tokens: int


class EngineServer(ABC):
    """Ends with its `with` block, however that ends; what it says is in `log`."""

    ENGINE: str
    """How the engine calls itself."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], log: Path, port: int
    ) -> None:
        self.log = log
        self.port = port
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._seen: dict[int, psutil.Process] = {}
        self._left = LeftBehind()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # --- life ---------------------------------------------------------------------------------

    def wait_until_ready(self: Self) -> Self:
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                status = self.process.returncode
                raise AssertionError(f"{self.ENGINE} ended with {status}: {self.tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("/health", timeout_s=10)[0] == 200:
                    self.family()
                    return self
            time.sleep(0.1)
        what = f"{self.ENGINE} was not ready in {START_DEADLINE_S:g} s"
        raise AssertionError(f"{what}: {self.tail()}")

    def family(self) -> list[psutil.Process]:
        """The server's processes, its first one first; none where it has ended.

        Also remembers them, and what memory they share, to see later that they are gone.
        """
        family = self._left.note(self.process.pid)
        self._seen |= {child.pid: child for child in family[1:]}
        return family

    def stop(self) -> int:
        """SIGTERM to the server, as an operator does it; answers its exit status."""
        self.family()
        self.process.send_signal(signal.SIGTERM)
        self.wait_until_gone()
        return self.process.returncode

    def wait_until_gone(self) -> None:
        """Return once the server and every process of it that was seen has ended."""
        self.process.wait(DEADLINE_S)
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=DEADLINE_S)
        assert not alive, f"still there: {alive}; {self.tail()}"

    def kill(self) -> None:
        """SIGKILL to every process of the server. Safe at any time."""
        if self.process.poll() is None:
            self.family()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for child in self._seen.values():
            with contextlib.suppress(psutil.Error):
                child.kill()
        self.process.wait(DEADLINE_S)
        psutil.wait_procs(list(self._seen.values()), timeout=DEADLINE_S)
        self._left.remove()

    def text(self) -> str:
        """What it has said."""
        return self.log.read_text(errors="replace")

    def tail(self, characters: int = 6000) -> str:
        return self.text()[-characters:]

    # --- requests -----------------------------------------------------------------------------

    @abstractmethod
    def complete(self, request: Request) -> list[int]:
        """The tokens; fewer than asked for where the request was aborted."""

    @abstractmethod
    def decided(self, request: Request) -> Request:
        """The same request, ended before the first token that rounding decides.

        Its best two tokens are so close that the order of a sum settles which it is, and that
        depends on what is computed beside it.
        """

    def complete_all(self, requests: Sequence[Request], at_once: int = 16) -> list[list[int]]:
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(self.complete, requests))

    def post(self, path: str, **body: Any) -> bytes:
        """What was answered; the status must be 200."""
        status, text = self.request(path, "POST", REQUEST_DEADLINE_S, body)
        assert status == 200, f"{status}: {text!r}\n{self.tail()}"
        return text

    def request(
        self,
        path: str,
        method: str = "GET",
        timeout_s: float = REQUEST_DEADLINE_S,
        body: Any = None,
    ) -> tuple[int, bytes]:
        """The status and what was answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def own_environment() -> dict[str, str]:
    """The tests' own environment without kvelastic's variables."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "KVELASTIC_LEDGER"  # the run's own
        or not name.startswith(("KVELASTIC_", "KVCACHED_", "ENABLE_KV"))
    }
