"""A program on a terminal of its own, with somebody who types and reads.

    with Terminal(["kvctl", "shell"]) as terminal:
        terminal.until("kvctl> "); terminal.type("list\\r"); terminal.press_ctrl_c()

What was read up to a text is gone for the next `until`. Nothing here sleeps: it reads until the
text is there, and fails when that takes more than a time that no machine needs.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from pathlib import Path

from waiting import DEADLINE_S


def written_to_a_terminal(
    command: list[str],
    environment: dict[str, str],
    *,
    columns: int | None = None,
    stderr: int | None = None,
    exit_code: int = 0,
) -> str:
    """All that a program writes to a terminal until it ends; nobody types.

    `stderr` goes to the terminal too unless it is said where else.
    """
    ours, theirs = pty.openpty()
    if columns is not None:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command,
        stdout=theirs,
        stderr=theirs if stderr is None else stderr,
        stdin=theirs,
        env=environment,
    )
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:
        pass  # the other end is closed
    os.close(ours)
    assert process.wait(timeout=DEADLINE_S) == exit_code
    return written.decode()


class Terminal:
    """A running program; leaving the block ends it."""

    def __init__(self, command: list[str], *, columns: int = 120, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        base = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
        self.process = subprocess.Popen(
            # Ctrl-C is a signal only to those whose controlling terminal this is.
            ["setsid", "--ctty", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=base | {"TERM": "xterm-256color", "NO_COLOR": "1"} | environ,
        )
        os.close(theirs)
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def press_ctrl_c(self) -> None:
        self.type("\x03")

    def press_ctrl_d(self) -> None:
        self.type("\x04")

    def until(self, text: str) -> str:
        """Read until `text` has been written; returns all before it."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self._unread:
            left_s = deadline - time.monotonic()
            ready, _, _ = select.select([self._ours], [], [], max(0.0, left_s))
            assert ready, f"{text!r} does not come; there is {self._unread!r}"
            try:
                chunk = os.read(self._ours, 65536)
            except OSError:
                chunk = b""
            assert chunk, f"ended without {text!r}; there is {self._unread!r}"
            self._unread += chunk.decode()
        before, _, self._unread = self._unread.partition(text)
        return before

    def until_it_waits(self) -> None:
        """Return when the program sleeps, as it does once it has written all and waits for a key.

        Python's readline looks at signals only while it waits: a Ctrl-C in the moment between two
        keys counts when the next key comes, and no person is as quick as that.
        """
        deadline = time.monotonic() + DEADLINE_S
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, "it does not come to rest"
            os.sched_yield()

    def end(self) -> int:
        """Read what is left and wait for the end; the exit code."""
        while True:
            try:
                chunk = os.read(self._ours, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            if not chunk:
                break
            self._unread += chunk.decode()
        return self.process.wait(timeout=DEADLINE_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
