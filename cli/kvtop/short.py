"""Numbers in at most `CELLS` characters, for columns that stay in place while the values change.

short_size(96 << 20) == "96.0M"; short_rate(1234.0) == "1.2k"
"""

from __future__ import annotations

from typing import Final

CELLS: Final = 5
UNKNOWN: Final = "-"


def short_size(size_bytes: int | None) -> str:
    """Bytes with three digits or so: `0`, `512B`, `4.00G`, `1023M`; powers of 1024."""
    if size_bytes is None:
        return UNKNOWN
    if size_bytes < 1000:
        return f"{size_bytes}B" if size_bytes else "0"
    value = float(size_bytes)
    for unit in "KMGTPE":
        value /= 1024
        if value < 9.995:
            return f"{value:.2f}{unit}"
        if value < 99.95:
            return f"{value:.1f}{unit}"
        if value < 1023.5:
            return f"{value:.0f}{unit}"
    return "huge"


def short_rate(per_s: float | None) -> str:
    """Times a second: `0`, `0.3`, `12`, `1.2k`; powers of 1000."""
    if per_s is None:
        return UNKNOWN
    if per_s < 0.05:
        return "0"
    if per_s < 9.95:
        return f"{per_s:.1f}"
    if per_s < 9999.5:
        return f"{per_s:.0f}"
    for unit in "kMGT":
        per_s /= 1000
        if per_s < 999.5:
            return f"{per_s:.0f}{unit}" if per_s >= 9.95 else f"{per_s:.1f}{unit}"
    return "huge"


def short_count(count: int | None) -> str:
    """A whole number, as a priority: itself where it fits, else its sign and size."""
    if count is None:
        return UNKNOWN
    text = str(count)
    if len(text) <= CELLS:
        return text
    return "-big" if count < 0 else "big"
