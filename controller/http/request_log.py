"""Logs with one JSON object per line on stderr, and request ids."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import Any

from kvelastic.controller.http.log_writer import LogWriter, time_text


class RequestIds:
    """Ids that are unique over all controllers: a random prefix and a counter."""

    def __init__(self) -> None:
        self._prefix = os.urandom(8).hex()
        self._number = 0

    def next(self) -> str:
        """Return a new id."""
        self._number += 1
        return f"{self._prefix}-{self._number:x}"


class RequestLog:
    """Writes request lines and audit lines to a `LogWriter`."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    @property
    def dropped_lines(self) -> int:
        """Number of dropped lines of all kinds since the start."""
        return self._writer.dropped_lines

    def write(self, fields: dict[str, Any], *, kind: str = "request") -> None:
        """Add a line that begins with the time and the kind. Never blocks.

        Request lines are batched; other kinds are written immediately.
        """
        fields = {"time": time_text(time.time()), "kind": kind, **fields}
        self._writer.write(json.dumps(fields), at_once=kind != "request")


class JsonFormatter(logging.Formatter):
    """Formats log records of the process as JSON, like request lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of JSON."""
        fields: dict[str, Any] = {
            "time": time_text(record.created),
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


class _EventHandler(logging.Handler):
    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record), at_once=True)
        except Exception as error:  # the arguments do not match the message
            self._writer.write(json.dumps({"kind": "event", "message": f"not logged: {error!r}"}))


_NO_NEWS = ("without completing", '"WebSocket ', "Invalid UTF-8 sequence")
"""uvicorn's log texts for a response that was cut short, a new WebSocket (with its query, which may
contain a key), and, with a traceback, a client's message that is not valid text."""


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for records that request lines already cover."""
    return not any(each in str(record.msg) for each in _NO_NEWS)


def set_up_logging(writer: LogWriter, level: str = "INFO") -> None:
    """Send all log output of the process to `writer` as JSON.

    Python and its libraries print some of it to stderr, where a slow reader would block the loop:
    warnings, errors in finalizers and in threads, loggers without a handler.
    """
    logging.root.handlers[:] = [_EventHandler(writer)]
    for name in ("kvelastic", "uvicorn"):
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)
    sys.unraisablehook = lambda error: logging.root.error(
        "ignored, in %r", error.object, exc_info=error.exc_value
    )
    threading.excepthook = lambda error: logging.root.error(
        "a thread failed: %s", error.thread, exc_info=error.exc_value
    )
    logging.getLogger("uvicorn.error").addFilter(_is_news)
