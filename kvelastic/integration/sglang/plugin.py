"""The entry point that SGLang calls in each of its processes (`sglang.srt.plugins`).

SGLang logs and forgets an error that a plugin raises, and goes on without it. So what fails here
ends the process: a server that was to run on kvelastic never runs without it unnoticed.
"""

from __future__ import annotations

from kvelastic.integration.sglang.refusals import ends_process


@ends_process
def register() -> None:
    """Arm kvelastic in this process if `ENABLE_KVELASTIC` is true; else do nothing at all.

    Raises `SystemExit` with a message for a variable with a bad value, and for an SGLang that
    kvelastic does not know. What is to be hooked is hooked when SGLang imports it.
    """
    from kvelastic import config

    settings = config.load()
    if not settings.enabled:
        return
    config.configure_logging(settings)
    from kvelastic.hooks.versions import installed_series
    from kvelastic.integration.sglang import patches

    patches.arm(installed_series("sglang", strict=settings.strict))
