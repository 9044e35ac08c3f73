"""What runs when a process makes its first manager of continuous batching (`kvelastic.startup`)."""

from __future__ import annotations


def register() -> None:
    """Hook kvelastic into continuous batching if `ENABLE_KVELASTIC` is true; else do nothing.

    Raises `ConfigError` for a variable with a bad value, and `UnsupportedEngineError` for a
    transformers that kvelastic does not know; the manager is not made then.
    """
    from kvelastic import config

    settings = config.load()
    if not settings.enabled:
        return
    config.configure_logging(settings)
    from kvelastic.hooks.versions import installed_series
    from kvelastic.integration.transformers import patches

    patches.arm(installed_series("transformers", strict=settings.strict))
