"""Python programs that a test starts.

run_python("-c", "print(1)").stdout                # runs to its end; a failure shows its output

with LineProgram(PROGRAMS / "two_pools.py", name) as program:
    assert program.ask("alloc 8") == "ok"          # sends a line, returns the next line of stdout
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from waiting import DEADLINE_S

PROGRAMS = Path(__file__).parent

Self = TypeVar("Self", bound="LineProgram")


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

    Leaving the `with` block kills it. Its stderr is this process's own.
    """

    def __init__(
        self,
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        self.command = [str(python), *map(str, arguments)]
        self.process = subprocess.Popen(
            self.command,
            env=None if environment is None else os.environ | dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self) -> str:
        """Return the next line, without its end. Raises AssertionError if the program has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.endswith("\n"), f"{self.command} ended with {self.process.wait(DEADLINE_S)}"
        return line[:-1]

    def ask(self, line: str) -> str:
        self.send(line)
        return self.read()

    def finish(self) -> int:
        """Close its stdin, wait for its end and return its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        """SIGKILL. Safe at any time."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # a line that was not yet flushed
                stream.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
