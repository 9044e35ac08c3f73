"""`scripts/bench ledger`: what instances pay for sharing a device.

    scripts/bench ledger               all parts, about six minutes
    scripts/bench ledger --quick       a minute; its figures are no evidence
    scripts/bench ledger --part grants --part listing

Every figure is printed beside a floor or a baseline of the same run. README.md says what they mean.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

from benchmarks.harness import end_by_exception, facts
from benchmarks.ledger import results

TITLES = {
    "grants": "1. A page granted and returned, uncontended",
    "eight_takers": "2. Eight processes take and return pages at once",
    "moved_gib": "3. A busy model gets a GiB that an idle one's cache holds",
    "listing": "4. kvctl list with 20 instances",
    "idle_footprint": "5. What stays held after staggered traffic",
}


def run_part(name: str, *, quick: bool) -> results.Part:
    """Measures one part, in this process and its children."""
    module = importlib.import_module(f"benchmarks.ledger.{name}")
    load = os.getloadavg()[0]
    start = time.monotonic()
    figures = module.figures(module.QUICK if quick else module.FULL)
    return results.Part(name, TITLES[name], load, time.monotonic() - start, figures)


def main() -> int:
    """Answers the process's status: 1 where a part failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few rounds; kept in build/")
    parser.add_argument("--part", action="append", choices=TITLES, help="only this (repeatable)")
    parser.add_argument("--results", type=Path, help="the folder for JSON and Markdown")
    given = parser.parse_args()
    # A part alone must not replace a whole run's file.
    whole = not given.quick and given.part is None
    folder = given.results or (results.FOLDER if whole else results.ROOT / "build/bench-ledger")
    told = facts()
    parts: list[results.Part] = []
    failed: dict[str, str] = {}
    for name in given.part or TITLES:
        try:
            part = run_part(name, quick=given.quick)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} FAILED: {failed[name]}\n", file=sys.stderr, flush=True)
            continue
        parts.append(part)
        print(part.text() + "\n", flush=True)
    path = results.write(folder, told, parts, failed)
    print(f"kept in {path}.{{json,md}}")
    return 1 if failed else 0


if __name__ == "__main__":
    end_by_exception()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
