"""`scripts/bench ledger`: what instances pay for sharing a device.

    scripts/bench ledger               all parts, about six minutes
    scripts/bench ledger --quick       a minute; its figures are no evidence
    scripts/bench ledger --part grants --part listing

Every figure is printed beside a floor or a baseline of the same run. README.md says what they mean.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from benchmarks.pages import Table, arguments, run

TITLES = {
    "grants": "1. A page granted and returned, uncontended",
    "eight_takers": "2. Eight processes take and return pages at once",
    "moved_gib": "3. A busy model gets a GiB that an idle one's cache holds",
    "listing": "4. kvctl list with 20 instances",
    "idle_footprint": "5. What stays held after staggered traffic",
}


def _part(name: str) -> Callable[[bool], Table]:
    def measure(quick: bool) -> Table:
        module = importlib.import_module(f"benchmarks.ledger.{name}")
        return Table.of_figures(module.figures(module.QUICK if quick else module.FULL))

    return measure


PARTS = {name: (title, _part(name)) for name, title in TITLES.items()}


if __name__ == "__main__":
    sys.exit(run("ledger", "Ledger benchmark", arguments("ledger", __doc__, PARTS), PARTS))
