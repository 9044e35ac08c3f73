"""What all tests share: `--soak`, what a run skips, and looks at what a test and a run leave."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from run_end import Traces

SHM = Path("/dev/shm")

# Tests share a device with nobody: not with one another's leftovers, not with what else runs here.
os.environ["KVELASTIC_LEDGER"] = f"test-{os.getpid()}"

# Fakes that outlive their parents on purpose end with the run.
os.environ["PID_OF_TEST_RUN"] = str(os.getpid())

traces = Traces()
left_at_the_end: list[str] = []

# A shell that runs this in the background has Ctrl-C ignored, and a child inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No example has a time limit: the machine is shared, and no test is a timed test.
settings.register_profile("kvelastic", deadline=None)
settings.load_profile("kvelastic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests that take minutes, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --soak"))


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    """What this run is going to skip, and why: from the marks that the tests have."""
    reasons = Counter(reason for item in items if (reason := _why_skipped(item)) is not None)
    return [f"will skip {count}: {reason}" for reason, count in sorted(reasons.items())]


def _why_skipped(item: pytest.Item) -> str | None:
    for mark in item.iter_markers():
        if mark.name == "skip" or (mark.name == "skipif" and any(mark.args)):
            return str(mark.kwargs["reason"])
    return None


@pytest.hookimpl(trylast=True)  # after the last fixture's end
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that leaves something behind has failed, however it ended."""
    left_at_the_end.extend(traces.left())
    if left_at_the_end and session.exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if left_at_the_end:
        terminalreporter.section("left behind by this run", red=True)
        for line in left_at_the_end:
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory() -> Iterator[None]:
    """Fail a test that leaves a segment of this very process, or one that no live process owns.

    What a fixture of a wider scope has made is there before the test; a server that it runs on is
    another process, and alive.
    """
    before = _files()
    yield
    traces.look()
    new = _files() - before
    if not new:
        return
    from kvelastic import segment

    left = [name for name in new if name.startswith(".kvelastic_new_")]
    left += [
        info.name
        for info in segment.list_segments()
        if info.name in new and (info.status == "dead" or info.header.get("pid") == os.getpid())
    ]
    assert not left, f"left behind in /dev/shm: {left}"


def _files() -> set[str]:
    return {path.name for path in SHM.iterdir()}
