"""Parses and formats values with units: bytes, percentages, durations and ages.

    parse_size("1.5GiB") == parse_size("1536M") == 1610612736
    format_size(1610612736) == "1.50 GiB"
    parse_percent("80%") == 80.0
    parse_duration_s("5m") == parse_duration_s(300) == 300.0

K, KB and KiB all mean 1024 bytes, as in kvcached's interface. The larger units work the same way.
"""

from __future__ import annotations

import re
from typing import Final

from kvelastic.errors import InvalidArgumentError

KIB_BYTES: Final = 1 << 10
MIB_BYTES: Final = 1 << 20
GIB_BYTES: Final = 1 << 30
TIB_BYTES: Final = 1 << 40

GRANULARITY_BYTES: Final = 2 << 20
"""The smallest mapping of a driver. Page addresses and sizes are multiples of it."""

MAX_SIZE_BYTES: Final = (1 << 63) - 1
"""The largest size: segments store sizes as signed 64-bit integers."""

MAX_PRIORITY: Final = 1000
"""The highest priority of an instance; the lowest is its negative.

The control block enforces it (`_vmm.MAX_PRIORITY`). It is repeated here so that reading the
configuration does not load the native module, which takes longer than the rest.
"""

SIZE_FORMS: Final = (
    "bytes as a plain number, or a number with K, M, G or T, optionally followed by B or iB"
    " (512M, 1.5GiB, 2g, 1_073_741_824)"
)
PERCENT_FORMS: Final = "a number from 0 to 100, with or without a percent sign (80, 12.5%)"

MAX_DURATION_S: Final = 10 * 365 * 86400.0
DURATION_FORMS: Final = "seconds as a number, or numbers with ms, s, m, h or d (90s, 5m, 1h30m)"

_UNIT_BYTES: Final = {"": 1, "k": KIB_BYTES, "m": MIB_BYTES, "g": GIB_BYTES, "t": TIB_BYTES}
# At most 40 digits on either side, so that the arithmetic below is fast for any input.
_NUMBER: Final = r"([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})"
_SIZE: Final = re.compile(_NUMBER + r"\s*(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)
_PERCENT: Final = re.compile(_NUMBER + r"\s*%?")

_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(ms|s|m|h|d)")
_SECONDS: Final = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")


def parse_size(text: str) -> int:
    """Parse a size in bytes; a remaining fraction of a byte (as in `0.1T`) is dropped.

    Ignores case, `_` and `,`. Raises `InvalidArgumentError` for anything else: empty, negative,
    nan, inf, an unknown unit, more than `MAX_SIZE_BYTES`, a fraction without a unit (`0.5`), or
    less than one byte.
    """
    match = _SIZE.fullmatch(text.replace("_", "").replace(",", "").strip())
    if match is None:
        raise InvalidArgumentError(f"size {text!r} is not understood; write {SIZE_FORMS}.")
    whole, _, decimals = match[1].partition(".")
    # Use integers, because a float is not exact above 2**53.
    scaled_bytes = int(whole + decimals) * _UNIT_BYTES[(match[2] or "").lower()]
    size_bytes, part = divmod(scaled_bytes, int(10 ** len(decimals)))
    if part and (not size_bytes or not match[2]):
        what = "a fraction of a byte" if not match[2] else "less than a byte"
        raise InvalidArgumentError(
            f"size {text!r} is {what}; write whole bytes, or a larger unit ({match[1]}G)."
        )
    if size_bytes > MAX_SIZE_BYTES:
        raise InvalidArgumentError(
            f"size {text!r} is larger than {format_size(MAX_SIZE_BYTES)}; write a smaller one."
        )
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Format bytes for people: `512 B`, `1.50 GiB`; a negative number keeps its sign."""
    if size_bytes < 0:
        return "-" + format_size(-size_bytes)
    if size_bytes < KIB_BYTES:
        return f"{size_bytes} B"
    for unit, unit_bytes in (("KiB", KIB_BYTES), ("MiB", MIB_BYTES), ("GiB", GIB_BYTES)):
        # Compare the rounded value: 1048575 bytes are 1.00 MiB, not 1024.00 KiB.
        if round(size_bytes / unit_bytes, 2) < 1024:
            return f"{size_bytes / unit_bytes:.2f} {unit}"
    return f"{size_bytes / TIB_BYTES:.2f} TiB"


def size_argument(size_bytes: int) -> str:
    """Format bytes exactly, as a command argument: `102M`, `2G`, `1000`."""
    for unit, unit_bytes in (("T", TIB_BYTES), ("G", GIB_BYTES), ("M", MIB_BYTES)):
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)


def whole_pages(limit_bytes: int, page_bytes: int) -> int:
    """Return a limit, or a guarantee above 0, rounded down to whole pages; at least one page."""
    if page_bytes <= 0:
        return limit_bytes
    return max(limit_bytes // page_bytes, 1) * page_bytes


def format_limit(limit_bytes: int, page_bytes: int) -> str:
    """Format a limit or guarantee for people, with its whole pages if their size differs."""
    text, allowed_bytes = format_size(limit_bytes), whole_pages(limit_bytes, page_bytes)
    if allowed_bytes > limit_bytes:
        return f"{text} ({format_size(allowed_bytes)}: one page is the least)"
    if allowed_bytes < limit_bytes:
        return f"{text} ({format_size(allowed_bytes)} in whole pages)"
    return text


def format_pages(size_bytes: int, page_bytes: int) -> str:
    """Format whole pages for people: `68.00 MiB (2 pages of 34.00 MiB)`."""
    if page_bytes <= 0:
        return format_size(size_bytes)
    count = size_bytes // page_bytes
    pages = "1 page" if count == 1 else f"{count} pages of {format_size(page_bytes)}"
    return f"{format_size(size_bytes)} ({pages})"


def parse_percent(text: str) -> float:
    """Parse a percentage from 0 to 100; raises `InvalidArgumentError` for anything else."""
    match = _PERCENT.fullmatch(text.strip())
    percent = None if match is None else float(match[1])
    if percent is None or percent > 100:
        raise InvalidArgumentError(f"percentage {text!r} is not accepted; write {PERCENT_FORMS}.")
    return percent


def parse_duration_s(value: object) -> float:
    """Return a duration in seconds. Raises `InvalidArgumentError` for anything else."""
    seconds = _seconds(value)
    if seconds is None or not 0 <= seconds <= MAX_DURATION_S:
        raise InvalidArgumentError(f"duration {value!r} is not understood; write {DURATION_FORMS}.")
    return seconds


def parse_age_s(value: object) -> float:
    """Return an age above 0 in seconds. It has a unit, because a bare 7 may mean days.

    Raises `InvalidArgumentError`.
    """
    has_unit = isinstance(value, str) and not _SECONDS.fullmatch(value.strip())
    age_s = _seconds(value) if has_unit else None
    if age_s is None or not 0 < age_s <= MAX_DURATION_S:
        raise InvalidArgumentError(
            f"{value!r} is not an age; write 90s, 15m, 12h or 7d, at most 3650d."
        )
    return age_s


def _seconds(value: object) -> float | None:
    if isinstance(value, int | float):
        # Compare before the conversion: an int of 400 digits does not fit a float.
        is_number = not isinstance(value, bool) and 0 <= value <= MAX_DURATION_S
        return float(value) if is_number else None
    if not isinstance(value, str):
        return None
    text = value.strip().lower()
    if _SECONDS.fullmatch(text):
        return float(text)
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)
