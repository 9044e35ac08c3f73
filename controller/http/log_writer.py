"""Writes log lines to a stream that may be full, slow or closed, without blocking the callers.

    with LogWriter.of_stderr() as writer:
        writer.write('{"kind": "request", ...}')                 # within 0.2 s
        writer.write('{"kind": "event", ...}', at_once=True)
        writer.dropped_lines                                     # since the start

One thread writes; all other threads append to its queue. If the stream blocks, only that thread
blocks. The queue has a bound; lines beyond it are dropped and counted. When the stream accepts data
again, a line reports how many were dropped.

Non-blocking writes would need no thread. But `O_NONBLOCK` is a property of the open file, and the
shell and other programs share the terminal or pipe on stderr.
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
from typing import Final

MOST_WAITING_BYTES: Final = 4 << 20
"""About 10,000 request lines: a reader may stall for seconds under full load."""
_BATCH_S: Final = 0.2
_PIECE_BYTES: Final = 64 << 10
_STDERR: Final = 2


def time_text(unix_s: float) -> str:
    """Return a time in the log's format: ISO 8601, UTC, milliseconds."""
    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="milliseconds")


class LogWriter:
    """A queue of log lines and the thread that writes them. Any thread may call it."""

    def __init__(self, fd: int | None, *, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        """Take ownership of `fd`. If it is None, every line is dropped."""
        self.dropped_lines = 0
        """Lines dropped since the start, beyond the bound or after a write error (a full disk)."""
        self._fd = fd
        self._most_waiting_bytes = most_waiting_bytes
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        # Both must be reentrant: a finalizer run by the garbage collector may log. So an RLock,
        # and a SimpleQueue instead of an Event.
        self._lock = threading.RLock()
        self._calls: SimpleQueue[bool] = SimpleQueue()
        """Wake-ups of the thread: False when the queue becomes non-empty, True for each line to
        write immediately."""
        self._told_dropped = 0
        self._is_inside_line = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @classmethod
    def of_stderr(cls) -> LogWriter:
        """Return a writer to a duplicate of the current stderr."""
        if sys.__stderr__ is None:  # closed at the start: descriptor 2 may be another file now
            return cls(None)
        return cls(fcntl.fcntl(_STDERR, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1))

    def write(self, line: str, *, at_once: bool = False) -> None:
        """Queue a line (without a newline). Never blocks and never raises.

        The line is written within 0.2 s; one write per request would cost a tenth of the
        throughput. With `at_once` it and all earlier lines are written immediately.
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
        """Write the queued lines and stop. Blocks for at most `timeout_s`, then drops them."""
        self._is_closing = True
        self._calls.put(True)
        self._thread.join(timeout_s)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------- of the thread

    def _run(self) -> None:
        while not (self._is_closing and not self._lines):
            self._wait_for_a_batch()
            while self._lines:
                self._write_piece()
            self._report_dropped()
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
        # Lines count as waiting until here, so the bound includes the lines being written.
        with self._lock:
            self._waiting_bytes -= size_bytes
            self.dropped_lines += lost

    def _report_dropped(self) -> None:
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
        """Write all of `raw`; return the number of lines not written completely."""
        if self._fd is None:
            return raw.count(b"\n")
        if self._is_inside_line:  # the previous line was written in part
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
        """Write some bytes, blocking if needed; return their number (0: retry), or None."""
        try:
            return os.write(fd, raw)
        except BlockingIOError:
            # Another program that shares the stream has made it non-blocking.
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
            return 0
        except OSError:
            return None
