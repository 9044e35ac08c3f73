"""Logs: one JSON object a line on stderr, and the ids that requests are known by."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from typing import Any, Final, TextIO

_FLUSH_S: Final = 0.2
_MOST_LINES: Final = 2000


class RequestIds:
    """Ids that no two requests of any controller share: a random start, then counting."""

    def __init__(self) -> None:
        self._prefix = os.urandom(8).hex()
        self._number = 0

    def next(self) -> str:
        """A new one."""
        self._number += 1
        return f"{self._prefix}-{self._number:x}"


class RequestLog:
    """Lines of requests, written a few times a second: a write a request would cost a tenth."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def write(self, fields: dict[str, Any]) -> None:
        """Add a line; the time and the kind are put before it. Called in the loop."""
        fields = {"time": round(time.time(), 3), "kind": "request", **fields}
        self._lines.append(json.dumps(fields))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)
        elif len(self._lines) > _MOST_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting. A stream that is closed or full loses it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if lines:
            try:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                pass


class JsonFormatter(logging.Formatter):
    """What the controller says of itself, in the same form as the lines of requests."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields: dict[str, Any] = {
            "time": round(record.created, 3),
            "kind": "event",
            "level": record.levelname,
            "message": record.getMessage(),
        }
        model = getattr(record, "model", None)
        if model is not None:
            fields["model"] = model
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def set_up_logging(level: str = "INFO") -> None:
    """Send the controller's own log, and uvicorn's, to stderr as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("kvelastic", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
    # It says in prose what the lines of requests say: that an answer was cut short.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: "without completing response" not in record.getMessage()
    )
