"""Which module serves the vLLM that is installed; `engine_versions` has the table."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Protocol

from kvelastic import engine_versions
from kvelastic.errors import UnsupportedEngineError
from kvelastic.integration.vllm.hooks import Hook

_log = logging.getLogger("kvelastic.vllm")

SERIES: dict[str, str] = engine_versions.VLLM
"""Series of vLLM (major.minor) that were tried, and the module with their patches."""


class Adapter(Protocol):
    """What the module of a version offers."""

    HOOKS: tuple[Hook, ...]
    """What is hooked, for those who want to show it."""

    def arm(self) -> None:
        """Patch vLLM's modules as they are imported; again does nothing."""


def installed_version() -> str:
    """The version of vLLM in this process, as vLLM itself says it, e.g. `0.32.0+cpu`."""
    from vllm.version import __version__

    return str(__version__)


def module_for(version: str, *, strict: bool) -> str:
    """Name the module that serves `version`.

    With `strict=False` an untried version gets the newest module that is not newer than it (or
    the oldest one); the probes of that module still have to hold. Raises `UnsupportedEngineError`.
    """
    series = engine_versions.series_of(version)
    if series is not None and series in SERIES:
        return SERIES[series]
    tried = engine_versions.tried(SERIES)
    if strict:
        raise UnsupportedEngineError(
            f"kvelastic does not know vLLM {version}: it was tried with vLLM {tried}. Install one "
            "of these, unset ENABLE_KVELASTIC to run vLLM without kvelastic, or set "
            "KVELASTIC_STRICT=false to try this version all the same (every function that "
            "kvelastic touches is checked first)."
        )
    if not SERIES:
        raise UnsupportedEngineError(f"kvelastic serves no version of vLLM, found {version}.")
    chosen = engine_versions.nearest_series(SERIES, version)
    _log.warning(
        "vLLM %s was never tried with kvelastic (tried: %s); going on as if it were %s, because "
        "KVELASTIC_STRICT=false.",
        version,
        tried,
        chosen,
    )
    return SERIES[chosen]


def adapter(*, strict: bool) -> Adapter:
    """Import the patches for the installed vLLM. Raises `UnsupportedEngineError`."""
    module: Adapter = import_module(module_for(installed_version(), strict=strict))
    return module
