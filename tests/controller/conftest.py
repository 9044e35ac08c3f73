"""Fixtures and marks of the controller's tests."""

from __future__ import annotations

from collections.abc import Iterator

import needs
import pytest
from browser import Browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(needs.playwright)
            item.add_marker(needs.chromium)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser
