"""What kvelastic hooks into transformers' continuous batching: nothing yet."""

from __future__ import annotations

from typing import Final

from kvelastic.errors import UnsupportedEngineError
from kvelastic.hooks.table import Hook

HOOKS: Final[tuple[Hook, ...]] = ()
"""Everything that is wrapped."""


def arm(series: str) -> None:
    """Raise `UnsupportedEngineError`, so that nobody takes a stock cache for an elastic one."""
    raise UnsupportedEngineError(
        f"kvelastic hooks nothing into transformers {series} yet. Unset ENABLE_KVELASTIC to run it"
        " without kvelastic."
    )
