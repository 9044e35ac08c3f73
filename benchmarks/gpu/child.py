"""A step's process: its time is limited, its output bounded, and nothing that it began outlives it.

ended = run([sys.executable, "-m", "..."], limit_s=60, environment=os.environ, folder=Path())
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

HEAD_BYTES = 16 << 10
TAIL_BYTES = 48 << 10
"""What is kept of an output: its beginning and its end."""
ENDING_S = 3.0
"""How long a process that was told to end may take for it."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Ended:
    """How it went. `code` is negative for the signal that ended it."""

    code: int
    timed_out: bool
    took_s: float
    output: str

    @property
    def how(self) -> str:
        """What was wrong; empty where nothing was."""
        if self.timed_out:
            return f"not done after {self.took_s:.0f} s"
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}" if self.code else ""


class BoundedOutput:
    """The beginning and the end of what was written, however much that is."""

    def __init__(self) -> None:
        self._head = b""
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = HEAD_BYTES - len(self._head)
        self._head, data = self._head + data[:room], data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
            dropped = len(self._tail.popleft())
            self._tail_bytes -= dropped
            self._dropped += dropped

    def text(self) -> str:
        between = f"\n... {self._dropped} bytes left out ...\n" if self._dropped else ""
        tail = b"".join(self._tail)
        return self._head.decode(errors="replace") + between + tail.decode(errors="replace")


def run(
    command: Sequence[str], *, limit_s: float, environment: Mapping[str, str], folder: Path
) -> Ended:
    """Runs it in `folder` to its end, or until `limit_s`. Only the main thread may call it.

    Raises what a signal raises here; the process and all it began have ended then too.
    """
    libc = ctypes.CDLL(None)
    # What a step began and left is this process's child then, and can be found.
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    others = _children()
    begun = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # One call into libc and nothing of Python's that a thread could hold.
        preexec_fn=lambda: libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509
    )
    assert process.stdout is not None
    kept = BoundedOutput()
    reader = threading.Thread(target=_read, args=(process.stdout, kept), daemon=True)
    reader.start()
    timed_out = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        took_s = time.monotonic() - begun
        _end(process)
        _end_orphans(others)
        reader.join(ENDING_S)
    return Ended(process.returncode, timed_out, took_s, kept.text())


def _read(pipe: IO[bytes], kept: BoundedOutput) -> None:
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            kept.add(data)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and its group; asked first, so that it may tidy up."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_orphans(others: set[int]) -> None:
    """Whoever left the group and lost its parent has this process for one."""
    while orphans := _children() - others:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> set[int]:
    own = os.getpid()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything; state and parent follow the last one.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == own:
                found.add(int(entry.name))
    return found
