"""As which series the installed vLLM is served; `kvelastic.engines` has the table."""

from __future__ import annotations

import logging

from kvelastic import engines
from kvelastic.errors import UnsupportedEngineError

_log = logging.getLogger("kvelastic.vllm")

SERIES: tuple[str, ...] = engines.find("vllm").tried
"""Series of vLLM (major.minor) that were tried."""


def installed_version() -> str:
    """The version of vLLM in this process, as vLLM itself says it, e.g. `0.32.0+cpu`."""
    from vllm.version import __version__

    return str(__version__)


def series_for(version: str, *, strict: bool) -> str:
    """The series that `version` is served as.

    With `strict=False` an untried version is taken for the newest series that is not newer than it
    (or the oldest one); the probes of that still have to hold. Raises `UnsupportedEngineError`.
    """
    series = engines.series_of(version)
    if series is not None and series in SERIES:
        return series
    tried = engines.tried(SERIES)
    if strict:
        raise UnsupportedEngineError(
            f"kvelastic does not know vLLM {version}: it was tried with vLLM {tried}. Install one "
            "of these, unset ENABLE_KVELASTIC to run vLLM without kvelastic, or set "
            "KVELASTIC_STRICT=false to try this version all the same (every function that "
            "kvelastic touches is checked first)."
        )
    if not SERIES:
        raise UnsupportedEngineError(f"kvelastic serves no version of vLLM, found {version}.")
    chosen = engines.nearest_series(SERIES, version)
    _log.warning(
        "vLLM %s was never tried with kvelastic (tried: %s); going on as if it were %s, because "
        "KVELASTIC_STRICT=false.",
        version,
        tried,
        chosen,
    )
    return chosen
