"""Describes pydantic's validation errors in the words of a configuration file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_CLOSE: Final = 0.75
"""Matches a missing, doubled or wrong letter, but not just a shared word."""
_SAID: Final = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must have keys",
    "model_type": "must have keys",
    "missing": "is missing",
}


def faults_of(error: ValidationError, of: type[BaseModel]) -> list[str]:
    """Return one text per fault: its path and what it must be. No text shows a value.

    `of` is the model that was validated; the nearest one of its keys is proposed for a wrong key.
    """
    keys = set(_keys_of(of))
    return [
        _fault(fault["loc"], fault["type"], fault["msg"], keys)
        for fault in error.errors(include_input=False, include_url=False)
    ]


def _fault(place: tuple[int | str, ...], kind: str, message: str, keys: set[str]) -> str:
    path = ".".join(_shown(part) for part in place)
    if kind == "extra_forbidden":
        near = get_close_matches(str(place[-1])[:64], sorted(keys), n=1, cutoff=_CLOSE)
        meant = f"; is {near[0]} meant?" if near and near[0] != place[-1] else ""
        return f"{path}: there is no such key here{meant}"
    what = _SAID.get(kind) or message.removeprefix("Value error, ").partition(", unable to")[0]
    what = what.replace("Input should ", "must ")
    return f"{path}: {what}" if path else what


def _shown(part: int | str) -> str:
    """Return one part of a fault's path. Text other than a valid name may be secret, so hide it."""
    return str(part) if isinstance(part, int) or _NAME.fullmatch(part) else "(no name)"


def _keys_of(of: type[BaseModel]) -> Iterator[str]:
    schema: dict[str, Any] = of.model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        yield from part.get("properties", ())
