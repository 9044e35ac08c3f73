"""Who did what: a line in the log for everything that changes something, also for what was refused.

Reads have none. A key is named by its id, the first digits of its SHA-256, which is what a
configuration with `sha256:HEX` shows, too.
"""

from __future__ import annotations

from typing import Any

from kvelastic.controller.keys import Key
from kvelastic.controller.request_log import RequestLog

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
    """Add the line. Never blocks.

    `action` is the request, or the signal; `asked` what it wanted, where the path does not say it;
    `error` the code of the controller's own refusal, if it is one.
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
    """202: it is under way, and the answer does not know its end."""
    if status == 202:
        return "accepted"
    if 200 <= status < 400:
        return "done"
    return "refused" if 400 <= status < 500 else "failed"
