"""An engine in a process of its own, which takes commands and answers them in lines of JSON.

    child = LineChild("stock", [sys.executable, "-m", "..."], environment(), log)
    child.answer(45.0)                          # that it is ready
    told = child.ask("burst", 20.0, seed=1)
    child.send_end()
    child.end(15.0)

Every wait ends: a child that is silent or dead is a `ChildError` with the end of its log.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_TAIL = 3000
_ENDING_S = 8.0


class ChildError(Exception):
    """A child has ended, has not answered, or answers that it failed."""


class LineChild:
    """One child, the leader of a process group. Used by one thread."""

    def __init__(
        self, name: str, command: Sequence[str], environ: dict[str, str], log: Path
    ) -> None:
        self.name = name
        self._log = log
        self._read = b""
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=output, start_new_session=True,
            )  # fmt: skip

    def ask(self, do: str, limit_s: float, **values: Any) -> dict[str, Any]:
        """Send a command and return its answer. Raises `ChildError`."""
        self.tell(do, **values)
        return self.answer(limit_s)

    def tell(self, do: str, **values: Any) -> None:
        """Send a command; its answer is due before the next one. Raises `ChildError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildError(f"{self.name} has ended ({error}):\n{self.tail()}") from error

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the next answer. Raises `ChildError`."""
        assert self._process.stdout is not None
        end_s = time.monotonic() + limit_s
        while b"\n" not in self._read:
            left_s = max(0.0, end_s - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                raise ChildError(f"{self.name}: no answer in {limit_s:.0f} s:\n{self.tail()}")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_ENDING_S)
                code = self._process.returncode
                raise ChildError(f"{self.name} ended with {code}:\n{self.tail()}")
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise ChildError(f"{self.name}: {answer['failed']}\n{self.tail()}")
        return answer

    def tail(self) -> str:
        """The end of what it logged."""
        return self._log.read_text(errors="replace")[-_TAIL:]

    def send_end(self) -> None:
        """Close its input: it shuts down, and leaves nothing in shared memory."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill its process group, without waiting for the end."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, within_s: float = 0.0) -> None:
        """Wait for its end for `within_s`, then kill what is left. It has ended afterwards."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self.kill()
        self.send_end()
        assert self._process.stdout is not None
        self._process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)


def environment() -> dict[str, str]:
    """This process's, without kvelastic's variables; no child asks the network for a model."""
    ours = ("KVELASTIC_", "KVCACHED_", "ENABLE_KV")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
