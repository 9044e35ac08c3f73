"""Which versions of each engine are served: plain data that anybody may read.

    serves(VLLM, "0.32.0+cpu")       # True
    nearest_series(VLLM, "0.40.1")   # "0.32"

No engine is imported here, and no integration: the module is named, not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

VLLM: Final = ("0.32", "0.33")
"""Series of vLLM (major.minor) that were tried."""
VLLM_HOOKS: Final = "kvelastic.integration.vllm.patches"
"""The module whose `HOOKS` say what is hooked there."""


def series_of(version: str) -> str | None:
    """`0.32` of `0.32.0+cpu`; None for a text that does not start with two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return f"{found[1]}.{found[2]}" if found else None


def serves(table: Collection[str], version: str) -> bool:
    """Whether `version` belongs to a series of the table."""
    return series_of(version) in table


def tried(table: Collection[str]) -> str:
    """The table for people: `0.31.x, 0.32.x`, or `none`."""
    return ", ".join(f"{series}.x" for series in table) or "none"


def nearest_series(table: Collection[str], version: str) -> str:
    """The newest series that is not newer than `version`, else the oldest one.

    Raises ValueError for an empty table.
    """
    wanted = _numbers(series_of(version))
    older = [series for series in table if _numbers(series) <= wanted]
    return max(older, key=_numbers) if older else min(table, key=_numbers)


def _numbers(series: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in series.split(".")) if series else ()
