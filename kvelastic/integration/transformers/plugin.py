"""Runs when a process makes its first `ContinuousBatchingManager` (`kvelastic.startup`)."""

from __future__ import annotations


def register() -> None:
    """Hook kvelastic into continuous batching if `ENABLE_KVELASTIC` is true; else do nothing.

    Raises `ConfigError` for an invalid variable, and `UnsupportedEngineError` for an unsupported
    transformers. The manager is then not made.
    """
    from kvelastic import config

    if not config.is_enabled():
        return
    settings = config.load()
    config.configure_logging(settings)
    from kvelastic.integration.hooks.versions import installed_series
    from kvelastic.integration.transformers import patches

    patches.arm(installed_series("transformers", strict=settings.strict))
