"""What a run has found so far: one JSON file, replaced whole after every step.

A run is a folder under build/gpu: its parts are commands of their own, and each goes on where the
last one ended. A copy of the file goes where the results go, with the page beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
PASSED, FAILED, TIMED_OUT, NOT_RUN, RUNNING, CUT = (
    "passed", "failed", "timed out", "not run", "running", "cut off",
)  # fmt: skip
FINAL = (PASSED, FAILED, TIMED_OUT)
MOST_STARTS = 2
"""A step that ended this program so often is not begun again."""


class StateError(Exception):
    """A file is not a run's; the text says what to do."""


@dataclass
class Outcome:
    """What became of a step."""

    status: str = NOT_RUN
    why: str = ""
    took_s: float = 0.0
    at: str = ""
    commit: str = ""
    starts: int = 0
    findings: dict[str, Any] = field(default_factory=dict)
    output: str = ""

    @property
    def is_final(self) -> bool:
        return self.status in FINAL


@dataclass
class State:
    """All of a run."""

    begun: str
    stem: str
    """What its files are called."""
    simulated: bool
    quick: bool
    facts: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, Outcome] = field(default_factory=dict)
    unwritten: str = ""
    """Why the results could not be written; empty: they were."""

    def outcome(self, name: str) -> Outcome:
        """To be read: it is not the run's own where the step was not looked at."""
        return self.steps.get(name, Outcome())

    def figures(self, name: str) -> dict[str, Any]:
        """Of a step that has passed or found out something; empty where it has not."""
        told = self.outcome(name).findings.get("figures")
        return told if isinstance(told, dict) else {}

    def write(self, *paths: Path) -> None:
        """Never raises: results that cannot be written are said on stderr, and kept in memory."""
        text = json.dumps({"version": VERSION} | asdict(self), separators=(",", ":")) + "\n"
        self.unwritten = ""
        for path in paths:
            self.write_text(path, text)

    def write_text(self, path: Path, text: str) -> None:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(text)
            aside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            if not self.unwritten:
                print(f"results cannot be written to {path}: {error}", file=sys.stderr, flush=True)
            self.unwritten = f"{path}: {error}"


def new(stem: str, *, simulated: bool, quick: bool) -> State:
    return State(time.strftime("%Y-%m-%d %H:%M"), stem, simulated, quick)


def load(path: Path) -> State:
    """Raises `StateError` for a file that is not a run's, and `FileNotFoundError`."""
    try:
        told = json.loads(path.read_text())
        if told.pop("version") != VERSION:
            raise ValueError("another version")
        steps = {name: Outcome(**each) for name, each in told.pop("steps").items()}
        state = State(**told, steps=steps)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(
            f"{path} is not the state of a run ({error}); scripts/gpu --fresh begins another"
        ) from error
    for each in state.steps.values():
        if each.status != RUNNING:
            continue
        each.status, each.why = CUT, "the program that ran it has ended"
        if each.starts >= MOST_STARTS:
            each.status, each.why = FAILED, f"ended the program that ran it, {each.starts} times"
    return state
