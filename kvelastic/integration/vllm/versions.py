"""Which vLLM this is, and as which series it is served."""

from __future__ import annotations

from kvelastic import engines
from kvelastic.hooks.versions import series_for


def installed_version() -> str:
    """The version of vLLM in this process, as vLLM itself says it, e.g. `0.32.0+cpu`."""
    from vllm.version import __version__

    return str(__version__)


def series(*, strict: bool) -> str:
    """The series that it is served as; see `kvelastic.hooks.versions.series_for`."""
    return series_for(engines.find("vllm"), installed_version(), strict=strict)
