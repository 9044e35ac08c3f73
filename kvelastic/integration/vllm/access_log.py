"""What a server's access log leaves out: the controller's question every few seconds."""

from __future__ import annotations

import logging
from typing import Final

_LOGGER: Final = "uvicorn.access"
_OK: Final = 200


def leave_out_polls() -> None:
    """Keep `GET /is_sleeping` out of the access log of this process, if it was answered 200.

    Any number of times, before or after the server has set its logging up.
    """
    logging.getLogger(_LOGGER).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    # uvicorn's: client, method, path, version of HTTP, status
    match record.args:
        case (_, "GET", "/is_sleeping", _, status):
            return status != _OK
    return True
