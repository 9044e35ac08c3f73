"""Logs with one JSON object per line on stderr: requests, audited operations, and events."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any, Final

from kvelastic.controller.http.keys import Key
from kvelastic.controller.http.log_writer import LogWriter, time_text

_SHOWN: Final = 256


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

    def audit(
        self,
        *,
        action: str,
        status: int,
        error: str = "",
        model: str | None = None,
        key: Key | None = None,
        client: tuple[str, int] | None = None,
        request_id: str | None = None,
        asked: dict[str, Any] | None = None,
    ) -> None:
        """Add an audit line for an operation that changes something, also if it was refused.

        `action` is the request or the signal. `asked` has the requested values that are not in the
        path. `error` is the code of the controller's refusal, if any. The line names a key by its
        id; a configuration with `sha256:HEX` begins with the same digits. Never blocks.
        """
        fields = {
            "action": action[:_SHOWN],
            "model": None if model is None else model[:_SHOWN],
            "asked": asked,
            "outcome": _outcome(status),
            "status": status,
            "error": error,
            "key": None if key is None else key.id,
            "name": None if key is None else key.name,
            "client": None if client is None else f"{client[0]} port {client[1]}",
            "id": request_id,
        }
        self.write(fields, kind="audit")


def _outcome(status: int) -> str:
    """Return the outcome of a status. 202: in progress, with an unknown outcome."""
    if status == 202:
        return "accepted"
    if 200 <= status < 400:
        return "done"
    return "refused" if 400 <= status < 500 else "failed"


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


def set_up_logging(writer: LogWriter) -> None:
    """Send all log output of the process to `writer` as JSON.

    Python and its libraries print some of it to stderr, where a slow reader would block the loop:
    warnings, errors in finalizers and in threads, loggers without a handler.
    """
    logging.root.handlers[:] = [_EventHandler(writer)]
    for name in ("kvelastic", "uvicorn"):
        logging.getLogger(name).setLevel("INFO")
    logging.captureWarnings(True)
    sys.unraisablehook = lambda error: logging.root.error(
        "ignored, in %r", error.object, exc_info=error.exc_value
    )
    threading.excepthook = lambda error: logging.root.error(
        "a thread failed: %s", error.thread, exc_info=error.exc_value
    )
    logging.getLogger("uvicorn.error").addFilter(_is_news)
