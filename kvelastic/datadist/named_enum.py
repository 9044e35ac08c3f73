"""Numbers that print as their names, as the original's enumerations do.

str(LLMRole.MIX), f"{LLMRole.MIX}"          # "LLMRole.MIX"; an IntEnum alone is "3"
"""

from __future__ import annotations

from enum import IntEnum


class NamedEnum(IntEnum):
    """Base of the interface's enumerations; they compare and are stored as numbers."""

    def __str__(self) -> str:
        """The class and the member."""
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        """Return `str()`, padded as an f-string asks."""
        return format(str(self), spec)
