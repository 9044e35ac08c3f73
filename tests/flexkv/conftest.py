"""What FlexKV's tests share: its settings are read once a process, and each test has its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvelastic.flexkv.common.user_config import GLOBAL_CONFIG_FROM_ENV


@pytest.fixture(autouse=True)
def _settings_of_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("FLEXKV_"):
            monkeypatch.delenv(name)
    vars(GLOBAL_CONFIG_FROM_ENV).clear()
    yield
    vars(GLOBAL_CONFIG_FROM_ENV).clear()
