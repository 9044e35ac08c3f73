"""One thing that the doctor has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "note", "warning", "problem"]
"""note: good to know; warning: works, but slower, later or not for long; problem: does not work."""


@dataclass(frozen=True)
class Finding:
    """What one check has found. A check that looks at several things gives one finding for each."""

    check: str
    """Stable id, `topic.name`, for programs and for docs/doctor.md."""
    state: State
    what: str
    """The value that was seen, for people."""
    do: str
    """What to do next; empty only where all is well."""

    @property
    def topic(self) -> str:
        """The part of the id before the dot."""
        return self.check.partition(".")[0]
