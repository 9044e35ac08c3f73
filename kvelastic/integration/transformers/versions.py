"""Which transformers this is, and as which series it is served."""

from __future__ import annotations

from kvelastic import engines
from kvelastic.hooks.versions import series_for


def installed_version() -> str:
    """The version of transformers in this process, as it says it itself, e.g. `5.19.0`."""
    import transformers

    return str(transformers.__version__)


def series(*, strict: bool) -> str:
    """The series that it is served as; see `kvelastic.hooks.versions.series_for`."""
    return series_for(engines.find("transformers"), installed_version(), strict=strict)
