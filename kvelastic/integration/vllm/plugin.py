"""The entry point that vLLM calls in each of its processes (`vllm.general_plugins`).

vLLM logs and forgets an error that is raised while this module is *imported*, and dies of one that
`register` raises. So everything that can fail, and everything that takes time, happens inside.
"""

from __future__ import annotations


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
    from kvelastic.integration.vllm import access_log, patches

    access_log.leave_out_polls()
    patches.arm(series, tiers=bool(settings.tiers))
