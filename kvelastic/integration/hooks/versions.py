"""The version of the installed engine, and the series of `kvelastic.engines` that applies."""

from __future__ import annotations

import logging
from importlib import import_module

from kvelastic import engines
from kvelastic.engines import Engine
from kvelastic.errors import UnsupportedEngineError

_log = logging.getLogger("kvelastic.integration.hooks")


def installed_version(name: str) -> str:
    """Return the engine's own version string in this process, e.g. `0.32.0+cpu`."""
    return str(import_module(engines.find(name).version_module).__version__)


def installed_series(name: str, *, strict: bool) -> str:
    """Return the series for the engine in this process; see `series_for`."""
    return series_for(engines.find(name), installed_version(name), strict=strict)


def series_for(engine: Engine, version: str, *, strict: bool) -> str:
    """Return the series for a version of the engine.

    With `strict=False` an untested version gets the newest series that is not newer than it, or the
    oldest one. The probes of that series must still pass. Raises `UnsupportedEngineError`.
    """
    series = engines.series_in(engine.tried, version)
    if series is not None:
        return series
    title, tried = engine.title, engines.tried(engine.tried)
    if strict:
        raise UnsupportedEngineError(
            f"kvelastic does not know {title} {version}: it was tried with {title} {tried}. "
            f"Install one of these, unset ENABLE_KVELASTIC to run {title} without kvelastic, or "
            "set KVELASTIC_STRICT=false to try this version anyway (every function that kvelastic"
            " touches is checked first)."
        )
    if not engine.tried:
        raise UnsupportedEngineError(f"kvelastic serves no version of {title}, found {version}.")
    chosen = engines.nearest_series(engine.tried, version)
    _log.warning(
        "%s %s was never tried with kvelastic (tried: %s); going on as if it were %s, because "
        "KVELASTIC_STRICT=false.",
        title,
        version,
        tried,
        chosen,
    )
    return chosen
