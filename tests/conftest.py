"""What all tests share: tiers, what a run skips, and what a test or a run leaves behind.

A test's tier is decided by its markers; all tests in tests/engines have the marker `engine`:
fast      tests without a marker below
default   also `slow`, and `engine` with `end_to_end`
all       also `matrix` and `engine`
soak      also `soak`
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from lane import Lane, add_options
from run_end import Traces
from waiting import wait_until

if TYPE_CHECKING:
    from two_pools import TwoPools

SHM = Path("/dev/shm")

# Tests share a device with nobody: not with one another's leftovers, not with what else runs here.
os.environ["KVELASTIC_LEDGER"] = f"test-{os.getpid()}"

# Fakes that outlive their parents on purpose end with the run.
os.environ["PID_OF_TEST_RUN"] = str(os.getpid())

traces = Traces()
left_at_the_end: list[str] = []

TIERS = ("fast", "default", "all", "soak")

_PID = os.getpid()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Fixtures and the look at what is left run after SIGTERM, too; a forked child just ends."""
    if os.getpid() == _PID:
        signal.default_int_handler(signal.SIGINT, frame)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


signal.signal(signal.SIGTERM, _interrupt)
# A shell that runs this in the background has Ctrl-C ignored, and a child inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No example has a time limit: the machine is shared, and no test is a timed test.
settings.register_profile("kvelastic", deadline=None)
settings.load_profile("kvelastic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="all", help="the highest tier that is run")
    parser.addoption("--soak", action="store_true", help="the same as --tier=soak")
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.soak:
        config.option.tier = "soak"
    config.option.soak = config.option.tier == "soak"
    if config.getoption("--lane-events") is not None:
        config.pluginmanager.register(Lane(config), "lane")


@pytest.hookimpl(trylast=True)  # after folders have marked their tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    highest = TIERS.index(config.getoption("--tier"))
    left_out = [item for item in items if TIERS.index(tier_of(item)) > highest]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if TIERS.index(tier_of(item)) <= highest]


def tier_of(item: pytest.Item) -> str:
    """The lowest tier that runs this test."""
    markers = {mark.name for mark in item.iter_markers()}
    if "soak" in markers:
        return "soak"
    if "matrix" in markers or ("engine" in markers and "end_to_end" not in markers):
        return "all"
    return "default" if markers & {"engine", "slow"} else "fast"


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
    if (lane := session.config.pluginmanager.get_plugin("lane")) is not None:
        for line in left_at_the_end:
            lane.write({"left": line})
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


@pytest.fixture(autouse=True, scope="session")
def _own_folder_of_sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Another lane, or another run, has processes with the same names."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("run")
        folder.chmod(0o700)
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield


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
    from kvelastic.shared import segment

    # A living process renames such a file in the next moment.
    unnamed = {name for name in new if name.startswith(".kvelastic_new_")}
    wait_until(lambda: not unnamed & _files(), f"left behind in /dev/shm: {unnamed}")
    left = [
        info.name
        for info in segment.list_segments()
        if info.name in new and (info.status == "dead" or info.header.get("pid") == os.getpid())
    ]
    assert not left, f"left behind in /dev/shm: {left}"


@pytest.fixture
def shared() -> Iterator[TwoPools]:
    """Two pools of this process that share a device."""
    from two_pools import TwoPools

    made = TwoPools(f"two-pools-{os.getpid()}-{random.randrange(1 << 40):x}")
    yield made
    made.close()


def _files() -> set[str]:
    return {path.name for path in SHM.iterdir()}
