"""`scripts/bench ring`: what a command to several worker processes takes.

    scripts/bench ring               all parts, about two minutes
    scripts/bench ring --quick       some seconds; its figures are no evidence
    scripts/bench ring --part pages

Every figure is printed beside a floor or a baseline of the same run. README.md says what they mean.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import Figure, end_by_exception, facts
from benchmarks.ring import nothing, pages, results
from benchmarks.ring.channels import Library
from benchmarks.ring.group import Group

RANKS = (1, 2, 4, 8)

Measure = Callable[[Sequence[Group], bool], list[Figure]]
PARTS: dict[str, tuple[str, Measure]] = {
    "back_to_back": (
        "1. A command that does nothing, one right after another",
        lambda groups, quick: nothing.back_to_back(
            groups, nothing.QUICK if quick else nothing.FULL
        ),
    ),
    "apart": (
        "2. The same, a millisecond apart",
        lambda groups, quick: nothing.apart(
            groups, nothing.APART_QUICK if quick else nothing.APART_FULL
        ),
    ),
    "pages": (
        "3. One page of 2 MiB, host driver",
        lambda groups, quick: pages.figures(groups, pages.QUICK if quick else pages.FULL),
    ),
}


def run_part(name: str, groups: Sequence[Group], *, quick: bool) -> results.Part:
    """Measures one part."""
    title, measure = PARTS[name]
    load, start = os.getloadavg()[0], time.monotonic()
    figures = measure(groups, quick)
    return results.Part(name, title, load, time.monotonic() - start, figures)


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench ring",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few rounds; kept in build/")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this (repeatable)")
    parser.add_argument("--results", type=Path, help="the folder for JSON and Markdown")
    given = parser.parse_args()
    # A part alone must not replace a whole run's file.
    whole = not given.quick and given.part is None
    folder = given.results or (results.FOLDER if whole else results.ROOT / "build/bench-ring")
    told = facts()
    parts = []
    with ExitStack() as stack:
        library = stack.enter_context(Library.make())
        groups = [stack.enter_context(Group(library, ranks)) for ranks in RANKS]
        for name in given.part or PARTS:
            part = run_part(name, groups, quick=given.quick)
            parts.append(part)
            print(part.text() + "\n", flush=True)
    path = results.write(folder, told, parts)
    print(f"kept in {path}.{{json,md}}")


if __name__ == "__main__":
    end_by_exception()
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
