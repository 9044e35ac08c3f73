"""Evaluates the events of lanes: results of tests, and whether a run has passed.

results = Results()
results.add(event)                 # each event of each lane, see tests/programs/lane.py
results.failed(), results.slow()   # these are run again, alone
print(results.closing_line())
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

SLOW_S = 10.0
"""The longest that the body of a test of the default tier may take, without its fixtures.

Fixtures do not count: the first test of a lane sets up what many share, an import or a server.
Tests that start an engine are exempt.
"""
MOST_FLAKY = 3


@dataclass
class Result:
    """One test. `outcome` is passed, skipped or failed; `text` says why it failed."""

    outcome: str = "passed"
    seconds: float = 0.0
    body_s: float = 0.0
    """The part of `seconds` without fixtures."""
    text: str = ""
    is_finished: bool = False


@dataclass
class Results:
    """Results of the tests of one run, over all its lanes."""

    tests: dict[str, Result] = field(default_factory=dict)
    collected: set[str] = field(default_factory=set)
    end_to_end: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    """Failures outside of any test. Running a test again cannot fix them."""
    flaky: list[str] = field(default_factory=list)
    too_slow: list[str] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        if "test" in event:
            self._add_phase(event)
        elif "collected" in event:
            self.collected.update(event["collected"])
            self.end_to_end.update(event["end_to_end"])
        elif "broken" in event:
            self.problems.append(f"{event['broken']} cannot be collected:\n{event['text']}")
        elif "left" in event:
            self.problems.append(f"left behind: {event['left']}")

    def _add_phase(self, event: dict[str, Any]) -> None:
        result = self.tests.setdefault(event["test"], Result())
        result.seconds += event["seconds"]
        if event["phase"] == "call":
            result.body_s = event["seconds"]
        if event["outcome"] == "failed":
            result.outcome = "failed"
            result.text += f"[{event['phase']}]\n{event['text']}\n"
        elif event["outcome"] == "skipped" and result.outcome != "failed":
            result.outcome = "skipped"
        result.is_finished = event["phase"] == "teardown"

    def failed(self) -> list[str]:
        return [name for name, result in self.tests.items() if result.outcome == "failed"]

    def slow(self) -> list[str]:
        return [
            name
            for name, result in self.tests.items()
            if result.body_s > SLOW_S and result.outcome == "passed"
            if name not in self.end_to_end
        ]

    def unfinished(self) -> list[str]:
        """Tests that were running when their lane ended."""
        return [name for name, result in self.tests.items() if not result.is_finished]

    def never_run(self) -> set[str]:
        return self.collected - self.tests.keys()

    def passed_again(self, name: str) -> None:
        """Record that a failed test passed when run alone: it counts as passed, and as flaky."""
        self.tests[name].outcome = "passed"
        self.flaky.append(name)

    def has_passed(self) -> bool:
        return (
            bool(self.tests)
            and not self.failed()
            and not self.problems
            and not self.too_slow
            and not self.never_run()
            and len(self.flaky) <= MOST_FLAKY
        )

    def closing_line(self) -> str:
        count = Counter(result.outcome for result in self.tests.values())
        return f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"
