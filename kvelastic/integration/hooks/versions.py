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


def installed_series(name: str, *, strict: bool | None) -> str:
    """Return the series for the engine in this process; see `series_for`."""
    return series_for(engines.find(name), installed_version(name), strict=strict)


def series_for(engine: Engine, version: str, *, strict: bool | None) -> str:
    """Return the series for a version of the engine, by the rule of `engines.served_as`.

    Logs a warning for an untested version. The probes of its series must still pass. Raises
    `UnsupportedEngineError` if the version is refused.
    """
    title, tried = engine.title, engines.tried(engine.tried)
    series = engines.served_as(engine.tried, version, strict=strict)
    if series is None:
        raise UnsupportedEngineError(
            f"kvelastic does not know {title} {version}: it was tried with {title} {tried}. "
            f"Install one of these, unset ENABLE_KVELASTIC to run {title} without kvelastic, or "
            f"{engines.way_out(engine.tried, version)} to try this version anyway (every function "
            "that kvelastic touches is checked first)."
        )
    if not engines.serves(engine.tried, version):
        _log.warning(
            "%s %s is served as if it were %s: kvelastic was tried with %s %s, and every function "
            "that it touches is checked first. KVELASTIC_STRICT=true refuses untested versions.",
            title,
            version,
            series,
            title,
            tried,
        )
    return series
