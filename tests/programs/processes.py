"""Python programs that a test starts.

run_python("-c", "print(1)").stdout                # runs to its end; a failure shows its output

with LineProgram(PROGRAMS / "ring_worker.py", name, "paged", "8") as program:
    assert program.read() == "ready"
    assert program.ask("write 3 7") == "done"      # sends a line, returns the next line of stdout
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

from waiting import DEADLINE_S

PROGRAMS = Path(__file__).parent

Self = TypeVar("Self", bound="LineProgram")


UNMEASURED = {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
"""For a program whose imports are listed: `scripts/test --coverage` imports more in each."""


def run_python(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    standard_input: str | None = None,
    python: str | Path = sys.executable,
    exit_code: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Run a Python interpreter to its end and return what it wrote.

    `environment` is added to this process's own. Raises AssertionError, with both outputs, if the
    exit code is not `exit_code` (None accepts any).
    """
    command = [str(python), *map(str, arguments)]
    done = subprocess.run(
        command,
        env=None if environment is None else os.environ | dict(environment),
        cwd=folder,
        input=standard_input,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert exit_code is None or done.returncode == exit_code, (
        f"{command} ended with {done.returncode}, not {exit_code}:\n{done.stdout}\n{done.stderr}"
    )
    return done


class LineProgram:
    """A Python program that answers each line of its stdin with one line on its stdout.

    Leaving the `with` block kills it. Its stderr is the file `log`, or this process's own.
    A subclass may override `send` and `read`, for example to translate from and to JSON.
    """

    def __init__(
        self,
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
        log: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.command = [str(python), *map(str, arguments)]
        self.log = log
        with contextlib.ExitStack() as stack:
            self.process = subprocess.Popen(
                self.command,
                env=None if environment is None else os.environ | dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if log is None else stack.enter_context(log.open("wb")),
                pass_fds=pass_fds,
                text=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, line: str, /) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self) -> str:
        """Return the next line, without its end. Raises AssertionError if the program has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.endswith("\n"), self.how_it_ended()
        return line[:-1]

    def ask(self, line: str, /) -> str:
        self.send(line)
        return self.read()

    def stop(self) -> None:
        """SIGSTOP. Returns when all its threads have stopped. Safe at any time."""
        self.process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):  # it had ended
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """SIGCONT. Safe at any time."""
        self.process.send_signal(signal.SIGCONT)

    def finish(self) -> int:
        """Close its stdin, wait for its end and return its exit code. Safe at any time."""
        self._close(self.process.stdin)
        self.go_on()
        status = self.process.wait(DEADLINE_S)
        self._close(self.process.stdout)
        return status

    def kill(self, *, wait: bool = True) -> None:
        """SIGKILL. Without `wait` the process stays a zombie. Safe at any time."""
        self.process.kill()
        if not wait:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            return
        self.process.wait(DEADLINE_S)
        self._close(self.process.stdin)
        self._close(self.process.stdout)

    def how_it_ended(self) -> str:
        """Return its exit code and its log, for a failure's message."""
        log = "" if self.log is None else f":\n{self.log.read_text(errors='replace')}"
        return f"{self.command} ended with {self.process.wait(DEADLINE_S)}{log}"

    @staticmethod
    def _close(stream: IO[str] | None) -> None:
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # a line that was not yet flushed
            stream.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
