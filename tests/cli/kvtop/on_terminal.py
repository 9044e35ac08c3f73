"""kvtop on a terminal of its own, and what a person would see there.

with OnTerminal("name", columns=80, lines=24) as top:
    top.wait_for("applied"); top.press("l"); print(top.text)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte
from waiting import DEADLINE_S

KVTOP = str(Path(sys.executable).with_name("kvtop"))
KVCTL = str(Path(sys.executable).with_name("kvctl"))


class OnTerminal:
    """A running kvtop. Every wait has a deadline, and fails with the screen as it is then."""

    def __init__(
        self, *arguments: str, columns: int = 80, lines: int = 24, **environment: str
    ) -> None:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in {"NO_COLOR", "COLUMNS", "LINES", "LC_ALL", "PYTHONIOENCODING"}
        }
        # TERM=linux is what pyte understands all of.
        base = {"TERM": "linux", "LANG": "C.UTF-8", "PYTHONWARNINGS": "error"}
        self.screen = pyte.Screen(columns, lines)
        self.raw = b""
        self._stream = pyte.ByteStream(self.screen)
        self._child = pexpect.spawn(
            KVTOP, list(arguments), dimensions=(lines, columns), env=inherited | base | environment
        )

    @property
    def fd(self) -> int:
        return self._child.child_fd

    @property
    def rows(self) -> list[str]:
        return [row.rstrip() for row in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.rows)

    def press(self, keys: str) -> None:
        self._child.send(keys)

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        self._child.setwinsize(lines, columns)

    def signal(self, number: int) -> None:
        self._child.kill(number)

    def wait_for(self, what: str | Callable[[], bool]) -> None:
        """Until the screen has a text, over the ends of lines too, or a condition of it holds."""
        is_there = (lambda: self._shows(what)) if isinstance(what, str) else what
        deadline = time.monotonic() + DEADLINE_S
        while not is_there():
            assert time.monotonic() < deadline, f"not seen: {what}\n{self.text}"
            assert self._read(), f"kvtop ended:\n{self.text}"

    def _shows(self, what: str) -> bool:
        # With a long name, as of a process with a long id, a line is wrapped anywhere.
        return what in self.text or what in " ".join(self.text.split())

    def ended(self) -> int | None:
        """Wait until it has ended, and return its exit code; None: a signal ended it."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read():
            assert time.monotonic() < deadline, f"kvtop goes on:\n{self.text}"
        self._child.wait()
        return self._child.exitstatus

    def _read(self) -> bool:
        """Take what there is, or wait a moment for it; False at the end."""
        try:
            written = self._child.read_nonblocking(1 << 16, timeout=0.1)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += written
        self._stream.feed(written)
        return True

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        # pexpect's own close() gives a killed child a tenth of a second to be gone.
        if self._child.isalive():
            self._child.kill(signal.SIGKILL)
            self._child.wait()
        self._child.close(force=False)
