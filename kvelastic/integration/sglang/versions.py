"""Which SGLang this is, and as which series it is served."""

from __future__ import annotations

from kvelastic import engines
from kvelastic.hooks.versions import series_for


def installed_version() -> str:
    """The version of SGLang in this process, as it says it itself, e.g. `0.5.23`."""
    from sglang.version import __version__

    return str(__version__)


def series(*, strict: bool) -> str:
    """The series that it is served as; see `kvelastic.hooks.versions.series_for`."""
    return series_for(engines.find("sglang"), installed_version(), strict=strict)
