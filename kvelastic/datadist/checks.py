"""Checks of arguments: `TypeError` for a wrong type, `LLMParamError` (a `ValueError`) for a value.

A bool does not count as an integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar, overload

from kvelastic.datadist.status import LLMParamError

T = TypeVar("T")

MAX_UINT16: Final = (1 << 16) - 1
MAX_UINT32: Final = (1 << 32) - 1
MAX_UINT64: Final = (1 << 64) - 1
MAX_INT64: Final = (1 << 63) - 1


@overload
def instance(name: str, value: object, accepted: type[T]) -> T: ...
@overload
def instance(name: str, value: object, accepted: tuple[type, ...]) -> Any: ...
def instance(name: str, value: object, accepted: type | tuple[type, ...]) -> Any:
    """Return `value`, an instance of `accepted`."""
    if isinstance(value, accepted):
        return value
    types = accepted if isinstance(accepted, tuple) else (accepted,)
    raise TypeError(
        f"{name} is a {type(value).__name__}, must be {' or '.join(one.__name__ for one in types)}"
    )


def integer(name: str, value: object, *, least: int = 0, most: int = MAX_UINT64) -> int:
    """Return `value`, an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}, must be an int")
    if not least <= value <= most:
        raise LLMParamError(f"{name}={value} is not accepted; it must be {least} to {most}")
    return value


def integers(
    name: str, value: object, *, least: int = 0, most: int = MAX_UINT64, empty: bool = False
) -> list[int]:
    """Return the integers of a list or tuple."""
    found = list(sequence(name, value))
    for at, one in enumerate(found):
        if type(one) is not int or not least <= one <= most:  # lists of blocks are long
            integer(f"{name}[{at}]", one, least=least, most=most)
    if not found and not empty:
        raise LLMParamError(f"{name} is empty; name at least one")
    return found


def sequence(name: str, value: object) -> Sequence[Any]:
    """Return `value`, a list or tuple."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} is a {type(value).__name__}, must be a list or tuple")
    return value


def instances(name: str, value: object, accepted: type | tuple[type, ...]) -> list[Any]:
    """Return the instances in a list or tuple."""
    return [
        instance(f"{name}[{at}]", one, accepted) for at, one in enumerate(sequence(name, value))
    ]


def size(name: str, value: object) -> int:
    """Return a number of bytes to copy: 1 or more, or -1 for all."""
    found = integer(name, value, least=-1, most=MAX_INT64)
    if found == 0:
        raise LLMParamError(f"{name}=0 is not accepted; it must be -1 or 1 and more")
    return found


def step_one(name: str, value: object) -> range | None:
    """Return a range of layers with step 1; None means all layers."""
    if value is None:
        return None
    found = instance(name, value, range)
    if found.step != 1 or found.start < 0 or found.stop <= found.start:
        raise LLMParamError(f"{name}={found} is not accepted; it must be range(a, b), 0 <= a < b")
    return found
