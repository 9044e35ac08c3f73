"""What FlexKV's adapters import from here."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(a // -b)
