"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`).

If *importing* this module raises, vLLM logs the error and continues without the plugin. If
`register` raises, vLLM stops. So everything that can fail or take time happens inside `register`.
"""

from __future__ import annotations

import logging
from typing import Final

_LOGGER: Final = "uvicorn.access"
_OK: Final = 200


def register() -> None:
    """Arm kvelastic in this process if `ENABLE_KVELASTIC` is true; otherwise do nothing.

    vLLM calls it in each of its processes, possibly several times. Takes a few milliseconds:
    modules are patched later, when vLLM imports them.

    Raises `ConfigError` for an invalid variable and `UnsupportedEngineError` for an unknown vLLM
    version. vLLM's start then fails with that message.
    """
    from kvelastic import config

    if not config.is_enabled():
        return
    settings = config.load()
    config.configure_logging(settings)
    from kvelastic.integration.hooks.versions import installed_series

    series = installed_series("vllm", strict=settings.strict)
    from kvelastic.integration.vllm import patches

    leave_out_polls()
    patches.arm(series, tiers=settings.has_tiers)


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
