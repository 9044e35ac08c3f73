"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`).

vLLM logs and forgets an error that is raised while this module is *imported*, and dies of one that
`register` raises. So everything that can fail, and everything that takes time, happens inside.
"""

from __future__ import annotations

import logging
from typing import Final

_LOGGER: Final = "uvicorn.access"
_OK: Final = 200


def register() -> None:
    """Arm kvelastic in this process if `ENABLE_KVELASTIC` is true; else do nothing at all.

    Called by vLLM, any number of times, from any of its processes. Takes a few milliseconds: what
    is to be patched is patched when vLLM imports it.

    Raises `ConfigError` for a variable with a bad value, and `UnsupportedEngineError` if this
    vLLM has a version that kvelastic does not know; vLLM's start then fails with that message.
    """
    from kvelastic import config

    settings = config.load()
    if not settings.enabled:
        return
    config.configure_logging(settings)
    from kvelastic.hooks.versions import installed_series

    series = installed_series("vllm", strict=settings.strict)
    from kvelastic.integration.vllm import patches

    leave_out_polls()
    patches.arm(series, tiers=bool(settings.tiers))


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
