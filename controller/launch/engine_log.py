"""Reads a launched engine's log file: its last lines, and new output.

reader = LogReader(path)
data = reader.begin(200)     # the last 200 lines
data = reader.more()         # new output since the last call; b"" if there is none

The engine writes to the file independently of readers, so a slow reader delays nothing. A reader
that is too far behind skips to near the end, and gets a line with the number of bytes skipped:

    file    .......................=========
                   ^ reader        ^ skips to here if more than MOST_BEHIND_BYTES are unread
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

SHOWN_BYTES: Final = 256 << 10
"""Size of the part at the end of a file that is read for the last lines."""
MOST_BEHIND_BYTES: Final = 4 << 20
PIECE_BYTES: Final = 64 << 10


class LogReader:
    """A reader of one log file. Calls block briefly, and any thread may make them.

    The owner must call `close`. If a task is cancelled, its call in a thread may still run; it then
    finds the reader closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._is_over = False
        self._fd: int | None = None
        self._at = 0
        self._is_within_line = False

    def begin(self, lines: int) -> bytes:
        """Return the last `lines` lines within the last `SHOWN_BYTES`. Raises `OSError`."""
        with self._lock:
            return self._begin(lines) if self._open() else b""

    def more(self) -> bytes:
        """Return new output since the last call, at most `PIECE_BYTES`.

        If output was skipped, a line that reports it comes first. Raises `OSError`.
        """
        with self._lock:
            return self._more() if self._open() else b""

    def close(self) -> None:
        """Close the file; later calls return b"". Idempotent."""
        with self._lock:
            self._is_over = True
            self._let_go()

    def _begin(self, lines: int) -> bytes:
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        data = _from_a_line_s_begin(self._fd, max(0, size - SHOWN_BYTES), size)
        end = len(data) - data.endswith(b"\n")
        for _ in range(lines):
            end = data.rfind(b"\n", 0, end)
            if end < 0:
                break
        self._at = size
        return self._given(data[end + 1 :])

    def _more(self) -> bytes:
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        if size < self._at:
            self._at = 0  # the file was truncated
        note = b""
        if size - self._at > MOST_BEHIND_BYTES:
            note = self._go_on_near(size)
        data = os.pread(self._fd, PIECE_BYTES, self._at)
        self._at += len(data)
        if not data and not self._is_at_path():
            self._let_go()  # the path now names another file
        return note + self._given(data)

    def _open(self) -> bool:
        """Open the file if needed; return True if there is a file to read."""
        if self._fd is None and not self._is_over:
            with suppress(FileNotFoundError):
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        return self._fd is not None

    def _let_go(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self._at = 0

    def _is_at_path(self) -> bool:
        assert self._fd is not None
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return True  # keep reading until a new file appears

    def _go_on_near(self, size: int) -> bytes:
        """Skip all but the end of the file; return the line that reports it."""
        assert self._fd is not None
        rest = _from_a_line_s_begin(self._fd, size - SHOWN_BYTES, size)
        missed = size - len(rest) - self._at
        self._at = size - len(rest)
        line_end = b"\n" if self._is_within_line else b""
        return line_end + b"[%d bytes of this log are left out: they came too fast]\n" % missed

    def _given(self, data: bytes) -> bytes:
        if data:
            self._is_within_line = not data.endswith(b"\n")
        return data


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a file; an empty list if it is not readable. Blocks briefly."""
    reader = LogReader(path)
    try:
        return reader.begin(count).decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []
    finally:
        reader.close()


def _from_a_line_s_begin(fd: int, start: int, end: int) -> bytes:
    """Return the bytes from `start` to `end`, from the first line that begins there."""
    data = os.pread(fd, end - start, start)
    return data if start == 0 else data[data.find(b"\n") + 1 :]
