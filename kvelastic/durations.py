"""Parses durations: `90s`, `5m`, `1h30m`, `250ms`, or plain seconds; and ages, with a unit.

parse_duration_s("5m") == 300.0 == parse_duration_s(300)
"""

from __future__ import annotations

import re
from typing import Final

from kvelastic.errors import InvalidArgumentError

MAX_DURATION_S: Final = 10 * 365 * 86400.0
DURATION_FORMS: Final = "seconds as a number, or numbers with ms, s, m, h or d (90s, 5m, 1h30m)"

_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(ms|s|m|h|d)")
_PLAIN: Final = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")


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
    has_unit = isinstance(value, str) and not _PLAIN.fullmatch(value.strip())
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
    if _PLAIN.fullmatch(text):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)
