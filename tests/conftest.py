"""What all tests share: `--soak`, and a look at shared memory when a test is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

SHM = Path("/dev/shm")
SEGMENT_PREFIXES = ("kvelastic", ".kvelastic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests that take minutes, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --soak"))


def _segments() -> set[str]:
    return {path.name for path in SHM.iterdir() if path.name.startswith(SEGMENT_PREFIXES)}


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_in_shared_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module that leaves a segment which no live process owns."""
    before = _segments()
    yield
    left = _segments() - before
    if left:
        from kvelastic import segment

        dead = {info.name for info in segment.list_segments() if info.status == "dead"} & left
        assert not dead, f"{request.node.name} left dead segments behind: {sorted(dead)}"
