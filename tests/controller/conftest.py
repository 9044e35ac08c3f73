"""Fixtures and marks of the controller's tests."""

from __future__ import annotations

from collections.abc import Iterator

import needs
import pytest
from browser import Browser
from running import Controller, Engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(needs.playwright)
            item.add_marker(needs.chromium)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def engine(engine_of_all: Engine, front: Controller) -> Engine:
    """The one that a module's tests share, as if nobody had asked it anything, and awake."""
    engine_of_all.reset()
    for model in front.get("/models").json()["models"]:
        assert front.post(f"/action/wakeup/{model}").json()["success"]
    return engine_of_all
