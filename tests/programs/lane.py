"""The part of `scripts/test` inside pytest: shares tests with other processes, reports results.

`--lane-claims=FOLDER`: this process shares its tests with all that have the same folder, and all
collect the same tests. Tests form groups: a file, or the files that share a session's server. The
process that claims a group first runs it. `--lane-first=engine` claims groups that start a real
engine first, and `other` claims them last, so that an engine starts beside tests that compute.

`--lane-events=FILE`: appends one JSON object a line for each phase of each test, for each finished
group, and for what is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHARED_SERVERS = ("servers", "sglang_pairs")
"""Session fixtures that start real servers: tests that use the same one form one group."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes", "for scripts/test")
    group.addoption("--lane-claims", type=Path)
    group.addoption("--lane-first", choices=["engine", "other"], default="other")
    group.addoption("--lane-events", type=Path)


class Lane:
    """A pytest plugin. conftest.py registers it where `--lane-events` is given."""

    def __init__(self, config: pytest.Config) -> None:
        self._claims: Path | None = config.getoption("--lane-claims")
        self._first_is_engine = config.getoption("--lane-first") == "engine"
        # Unbuffered: one event is one write, and a killed process has written all its events.
        self._events = Path(config.getoption("--lane-events")).open("ab", buffering=0)  # noqa: SIM115

    def write(self, event: dict[str, Any]) -> None:
        self._events.write(json.dumps(event).encode() + b"\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        group_of = _groups(session.items)
        upcoming = self._claimed(session.items, group_of)
        item = next(upcoming, None)
        while item is not None:
            # Fixtures of this item end according to the next one, so its group is claimed now.
            following = next(upcoming, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            if following is None or group_of[following.path] != group_of[item.path]:
                self.write({"group": group_of[item.path]})
                _return_free_memory()
            item = following
        return True

    def _claimed(
        self, items: list[pytest.Item], group_of: dict[Path, str]
    ) -> Iterator[pytest.Item]:
        groups: dict[str, list[pytest.Item]] = {}
        for item in items:
            groups.setdefault(group_of[item.path], []).append(item)
        ordered = sorted(
            groups, key=lambda name: _has_engine(groups[name]) != self._first_is_engine
        )
        for name in ordered:
            if self._claim(name):
                yield from groups[name]

    def _claim(self, group: str) -> bool:
        if self._claims is None:
            return True
        file = self._claims / hashlib.sha256(group.encode()).hexdigest()
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        end_to_end = [item for item in session.items if item.get_closest_marker("end_to_end")]
        self.write(
            {
                "collected": [item.nodeid for item in session.items],
                "end_to_end": [item.nodeid for item in end_to_end],
            }
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write({"broken": report.nodeid, "text": report.longreprtext})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        event: dict[str, Any] = {
            "test": report.nodeid,
            "phase": report.when,
            "outcome": report.outcome,
            "seconds": report.duration,
        }
        if report.failed:
            captured = "".join(f"\n--- {title}\n{text}" for title, text in report.sections)
            event["text"] = report.longreprtext + captured
        self.write(event)


def _return_free_memory() -> None:
    """To the system: else the C library keeps it, and a lane runs for long."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _groups(items: list[pytest.Item]) -> dict[Path, str]:
    """The name of each file's group, the same in each process."""
    groups: dict[Path, str] = {}
    for item in items:
        groups.setdefault(item.path, item.nodeid.partition("::")[0])
        for server in SHARED_SERVERS:
            if server in getattr(item, "fixturenames", ()):
                groups[item.path] = f"tests that share {server}"
    return groups


def _has_engine(items: list[pytest.Item]) -> bool:
    return any(item.get_closest_marker("engine") is not None for item in items)
