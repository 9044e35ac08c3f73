"""How the value of one setting is read, from a file or from the environment: pure functions.

Each raises `ValueError`, whose text says what is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_LONGEST_TEXT = 4096


def boolean(value: object) -> bool:
    """0 or 1, true or false, yes or no, on or off."""
    word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("0 or 1, true or false")


def whole(*, least: int) -> Callable[[object], int]:
    """A reader of whole numbers that are not below `least`."""

    def read(value: object) -> int:
        if isinstance(value, str):
            value = int(value) if value.strip().lstrip("+-").isdecimal() else None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"a whole number, {least} or more")
        return value

    return read


def number(
    *, above: float | None = None, least: float | None = None, most: float | None = None
) -> Callable[[object], float]:
    """A reader of finite numbers above `above`, from `least`, up to `most`; whole ones stay so."""
    bounds = [
        f"above {above:g}" if above is not None else "",
        f"{least:g} or more" if least is not None else "",
        f"{most:g} at most" if most is not None else "",
    ]
    accepted = ", ".join(["a number", *filter(None, bounds)])

    def read(value: object) -> float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(accepted)
        if not math.isfinite(value):
            raise ValueError(accepted)
        too_small = (above is not None and value <= above) or (least is not None and value < least)
        if too_small or (most is not None and value > most):
            raise ValueError(accepted)
        return int(value) if value == int(value) else float(value)

    return read


def choice(*words: str) -> Callable[[object], str]:
    """A reader of one of `words`, in capitals or not; answers it as it stands in `words`."""
    known = {word.lower(): word for word in words}

    def read(value: object) -> str:
        word = known.get(value.strip().lower()) if isinstance(value, str) else None
        if word is None:
            raise ValueError(", ".join(words[:-1]) + f" or {words[-1]}")
        return word

    return read


def text(value: object) -> str:
    """A line of text."""
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or "\0" in value:
        raise ValueError("a line of text")
    return value


def folders(value: object) -> list[str]:
    """Folders: a list, or one text with `;` between them."""
    parts = value.split(";") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError("a folder, or several with ; between them")
    found = [text(part.strip()) for part in parts if part.strip()]
    if not found:
        raise ValueError("a folder, or several with ; between them")
    return found
