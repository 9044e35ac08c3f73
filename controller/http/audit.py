"""The audit log: one line per operation that changes something, including refused ones.

Reads are not audited. A line names a key by its id, the first digits of its SHA-256. A
configuration with `sha256:HEX` shows the same digits.
"""

from __future__ import annotations

from typing import Any

from kvelastic.controller.http.keys import Key
from kvelastic.controller.http.request_log import RequestLog

_SHOWN = 256


def audit(
    log: RequestLog,
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
    """Add a line to the audit log. Never blocks.

    `action` is the request or the signal. `asked` has the requested values that are not in the
    path. `error` is the code of the controller's refusal, if any.
    """
    log.write(
        {
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
        },
        kind="audit",
    )


def _outcome(status: int) -> str:
    """Return the outcome of a status. 202: in progress, with an unknown outcome."""
    if status == 202:
        return "accepted"
    if 200 <= status < 400:
        return "done"
    return "refused" if 400 <= status < 500 else "failed"
