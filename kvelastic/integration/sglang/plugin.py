"""The entry point that SGLang calls in each of its processes (`sglang.srt.plugins`).

SGLang logs a plugin's error and continues without the plugin. So an error here ends the process: a
server configured for kvelastic must never run without it unnoticed.
"""

from __future__ import annotations

from kvelastic.integration.sglang.refusals import ends_process


@ends_process
def register() -> None:
    """Arm kvelastic in this process if `ENABLE_KVELASTIC` is true; otherwise do nothing.

    Raises `SystemExit` with a message for an invalid variable or an unknown SGLang version. Modules
    are patched later, when SGLang imports them.
    """
    from kvelastic import config

    if not config.is_enabled():
        return
    settings = config.load()
    config.configure_logging(settings)
    from kvelastic.integration.hooks.versions import installed_series
    from kvelastic.integration.sglang import patches

    patches.arm(installed_series("sglang", strict=settings.strict))
