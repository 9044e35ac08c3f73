"""What a launched engine has written, read from its log file: the end of it, and what is added.

reader = LogReader(path)
data = reader.begin(200)     # the last 200 lines
data = reader.more()         # what has been added since; b"" if nothing

The engine writes to the file and knows of no reader, so a reader that is slow holds nothing up. One
that is too far behind is told how much it misses, and goes on near the end:

    file    .......................=========
                   ^ reader        ^ goes on here, if there is more than MOST_BEHIND_BYTES between
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

SHOWN_BYTES: Final = 256 << 10
"""The end of a file that is looked at."""
MOST_BEHIND_BYTES: Final = 4 << 20
PIECE_BYTES: Final = 64 << 10


class LogReader:
    """See the module. Its calls block for a short while, and any thread may make them.

    `close` it. A task that is cancelled leaves a call behind in its thread, which finds it closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._is_over = False
        self._fd: int | None = None
        self._at = 0
        self._is_within_line = False

    def begin(self, lines: int) -> bytes:
        """The last lines, as far as they are in the last `SHOWN_BYTES`. Raises `OSError`."""
        with self._lock:
            return self._begin(lines) if self._open() else b""

    def more(self) -> bytes:
        """What has been added since, at most `PIECE_BYTES` and a line about what was left out.

        Raises `OSError`.
        """
        with self._lock:
            return self._more() if self._open() else b""

    def close(self) -> None:
        """Let go of the file for good; safe to repeat."""
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
            self._at = 0  # it was emptied
        note = b""
        if size - self._at > MOST_BEHIND_BYTES:
            note = self._go_on_near(size)
        data = os.pread(self._fd, PIECE_BYTES, self._at)
        self._at += len(data)
        if not data and not self._is_at_path():
            self._let_go()  # another file has its name by now
        return note + self._given(data)

    def _open(self) -> bool:
        """Whether there is a file to read."""
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
            return True  # until there is another one

    def _go_on_near(self, size: int) -> bytes:
        """Leave out all but the end; returns the line that says so."""
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
    """The last lines of a file, as text; none where it cannot be read. Blocks for a short while."""
    reader = LogReader(path)
    try:
        return reader.begin(count).decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []
    finally:
        reader.close()


def _from_a_line_s_begin(fd: int, start: int, end: int) -> bytes:
    """What is between the two, less the rest of a line that begins before."""
    data = os.pread(fd, end - start, start)
    return data if start == 0 else data[data.find(b"\n") + 1 :]
