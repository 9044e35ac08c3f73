"""The remote tier over a real master, where Mooncake is installed."""

from __future__ import annotations

import importlib.util

import pytest
from processes import PROGRAMS, run_python

PROGRAM = PROGRAMS / "real_mooncake.py"


@pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None,
    reason="Mooncake is not installed: pip install 'kvelastic[remote]'",
)
def test_real_mooncake_master_restarts_and_serves() -> None:
    assert run_python(PROGRAM).stdout.strip() == "fine"
