"""Finds segments by name, and reports missing ones.

reaped = sweep()                  # the first step of every command that reads segments
info = readable("kvelastic_vLLM_4711", reaped)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvelastic.cli.rendering.exit_codes import fail
from kvelastic.cli.rendering.printing import print_lines
from kvelastic.errors import SegmentNotFoundError

if TYPE_CHECKING:
    from kvelastic.instance.row import Row
    from kvelastic.shared.segment import SegmentInfo


def sweep(*, quiet: bool = False) -> list[str]:
    """Remove the files of dead instances, report them on stderr, and return the segments' names.

    Their ledger entries are removed too. A memory request would also remove these, but there may be
    none.
    """
    from kvelastic.shared import ledger, segment

    reaped = segment.reap()
    ledger.reap()
    for name in reaped if not quiet else ():
        print_lines(f"Removed {name}, whose instance has ended.", err=True)
    return reaped


def rows(names: tuple[str, ...]) -> list[Row]:
    """Return the rows of every segment, or of the named ones.

    Raises `SegmentNotFoundError` for unknown names.
    """
    from kvelastic.instance.reading import look_at_all
    from kvelastic.instance.row import row_of

    found = [row_of(status) for status in look_at_all()]
    if not names:
        return found
    by_name = {row[key]: row for key in ("ipc", "name") for row in found}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise SegmentNotFoundError(f"no segment is called {', '.join(map(repr, missing))}")
    return list({by_name[name]["name"]: by_name[name] for name in names}.values())


def own_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the segments' own names for `names`, which may be names of kvcached segments.

    Raises `SegmentNotFoundError` for unknown names.
    """
    return tuple(row["name"] for row in rows(names)) if names else ()


def readable(name: str, reaped: list[str]) -> SegmentInfo:
    """Return one readable segment. `reaped` is the result of `sweep`.

    Raises `SegmentNotFoundError`, and `SegmentFormatError` if it is damaged or of another version.
    """
    from kvelastic.errors import SegmentFormatError
    from kvelastic.shared.segment import inspect

    try:
        info = inspect(name)
    except SegmentNotFoundError:
        explain_reaped(name, reaped)
        raise
    if info.status == "unreadable":
        raise SegmentFormatError(info.problem)
    return info


def explain_reaped(name: str, reaped: list[str]) -> None:
    """End the command with an error if `sweep` has just removed the segment."""
    if name in reaped:
        fail(f"the instance of {name!r} has ended; its segment was removed just now.")


def known_names() -> str:
    """Return a sentence with the existing names."""
    from kvelastic.shared.segment import list_segments

    names = [info.name for info in list_segments()]
    return f"Known names: {', '.join(names)}." if names else "There are no segments."
