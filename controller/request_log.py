"""Logs: one JSON object a line on stderr, and the ids that requests are known by."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import Any

from kvelastic.controller.log_writer import LogWriter, time_text


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
    """Lines of requests and of what is done to the controller, over a `LogWriter`."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    @property
    def dropped_lines(self) -> int:
        """Lines of any kind that nobody will ever read, since the start."""
        return self._writer.dropped_lines

    def write(self, fields: dict[str, Any], *, kind: str = "request") -> None:
        """Add a line; the time and the kind are put before it. Never blocks.

        Requests are many and wait a moment, to be written together; other kinds go at once.
        """
        fields = {"time": time_text(time.time()), "kind": kind, **fields}
        self._writer.write(json.dumps(fields), at_once=kind != "request")


class JsonFormatter(logging.Formatter):
    """What the controller says of itself, in the same form as the lines of requests."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
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
        except Exception as error:  # a message whose arguments do not fit it
            self._writer.write(json.dumps({"kind": "event", "message": f"not logged: {error!r}"}))


_NO_NEWS = ("without completing", '"WebSocket ', "Invalid UTF-8 sequence")
"""What uvicorn says of an answer that was cut short, of a WebSocket that was made (with its query,
which may have a key in it), and, with a traceback, of a client's message that is not valid text."""


def _is_news(record: logging.LogRecord) -> bool:
    """Not what the lines of requests say."""
    return not any(each in str(record.msg) for each in _NO_NEWS)


def set_up_logging(writer: LogWriter, level: str = "INFO") -> None:
    """Send what the process says of itself to `writer` as JSON.

    Python and its libraries print some of it to stderr, where the loop would wait for whoever
    reads that: warnings, errors in finalizers and in threads, loggers without a handler.
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
