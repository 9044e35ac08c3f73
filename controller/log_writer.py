"""Writes the log's lines to a stream that may be full, slow or gone, and never makes anyone wait.

    with LogWriter.of_stderr() as writer:
        writer.write('{"kind": "request", ...}')                 # within 0.2 s
        writer.write('{"kind": "event", ...}', at_once=True)
        writer.dropped_lines                                     # since the start

One thread writes; all others only put lines where it finds them. A pipe that nobody reads stops
that thread and nothing else: lines wait up to a bound, and those beyond it are dropped and
counted. When the stream takes lines again, one of them says how many were dropped.

Non-blocking writes would need no thread, but `O_NONBLOCK` is a property of the open file, and the
terminal or the pipe on stderr is open in the shell and in other programs too.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import datetime, timezone
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Final

MOST_WAITING_BYTES: Final = 4 << 20
"""Some 10,000 lines of requests: a reader may stand still for seconds under full load."""
_BATCH_S: Final = 0.2
_PIECE_BYTES: Final = 64 << 10
_STDERR: Final = 2


def time_text(unix_s: float) -> str:
    """A time as the log has it: ISO 8601, in UTC, to the millisecond."""
    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="milliseconds")


class LogWriter:
    """See the module. Any thread may call it."""

    def __init__(self, fd: int | None, *, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        """Takes over `fd` and closes it at its end; None has every line dropped."""
        self.dropped_lines = 0
        """Since the start: beyond the bound, or refused by the stream (a full disk, say)."""
        self._fd = fd
        self._most_waiting_bytes = most_waiting_bytes
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        # Both may be entered again by a thread that is in them: what the garbage collector
        # finalizes may log. So an RLock, and a SimpleQueue rather than an Event.
        self._lock = threading.RLock()
        self._calls: SimpleQueue[bool] = SimpleQueue()
        """One entry when lines begin to wait, and one for each line that is to go at once: True."""
        self._told_dropped = 0
        self._is_inside_line = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @classmethod
    def of_stderr(cls) -> LogWriter:
        """Writes to what is stderr now, under a descriptor of its own."""
        if sys.__stderr__ is None:  # it was closed at the start: its number is another file's now
            return cls(None)
        return cls(fcntl.fcntl(_STDERR, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1))

    def write(self, line: str, *, at_once: bool = False) -> None:
        """Add a line, without its end. Never blocks and never raises.

        It is written within 0.2 s, for a write a request would cost a tenth of the requests; or
        `at_once`, with all that came before it.
        """
        raw = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            if self._waiting_bytes + len(raw) > self._most_waiting_bytes:
                self.dropped_lines += 1
                return
            self._waiting_bytes += len(raw)
            self._lines.append(raw)
            is_first = len(self._lines) == 1
        if at_once or is_first:
            self._calls.put(at_once)

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what waits, for at most so long: a stream that nobody reads loses it. Blocks."""
        self._is_closing = True
        self._calls.put(True)
        self._thread.join(timeout_s)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    # -------------------------------------------------------------------------- of the thread

    def _run(self) -> None:
        while not (self._is_closing and not self._lines):
            self._wait_for_a_batch()
            while self._lines:
                self._write_piece()
            self._tell_dropped()
        if self._fd is not None:
            os.close(self._fd)

    def _wait_for_a_batch(self) -> None:
        is_urgent = self._calls.get()
        if not is_urgent and not self._is_closing:
            with suppress(Empty):
                self._calls.get(timeout=_BATCH_S)

    def _write_piece(self) -> None:
        lines: list[bytes] = []
        size_bytes = 0
        while self._lines and size_bytes < _PIECE_BYTES:
            lines.append(self._lines.popleft())
            size_bytes += len(lines[-1])
        lost = self._put(b"".join(lines))
        # Counted as waiting until here, so that the bound holds for what is being written too.
        with self._lock:
            self._waiting_bytes -= size_bytes
            self.dropped_lines += lost

    def _tell_dropped(self) -> None:
        dropped = self.dropped_lines
        count = dropped - self._told_dropped
        if count == 0:
            return
        fields = {
            "time": time_text(time.time()),
            "kind": "event",
            "level": "WARNING",
            "message": f"{count} lines of this log were dropped: it was not read, or was full",
        }
        if self._put(json.dumps(fields).encode() + b"\n") == 0:
            self._told_dropped = dropped

    def _put(self, raw: bytes) -> int:
        """Write it all; returns how many lines did not get there whole."""
        if self._fd is None:
            return raw.count(b"\n")
        if self._is_inside_line:  # of a line that the stream did not take whole
            raw = b"\n" + raw
        written = 0
        while written < len(raw):
            count = self._put_some(self._fd, raw[written:])
            if count is None:
                break
            written += count
        lost = raw.count(b"\n", max(written, int(self._is_inside_line)))
        if written:
            self._is_inside_line = raw[written - 1 : written] != b"\n"
        return lost

    @staticmethod
    def _put_some(fd: int, raw: bytes) -> int | None:
        """Wait until some of it is written; None where the stream refuses it."""
        try:
            return os.write(fd, raw)
        except BlockingIOError:
            # Whoever shares the stream has made it non-blocking.
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
            return 0
        except OSError:
            return None
