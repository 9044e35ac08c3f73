"""The remote tier over a real master, where Mooncake is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "real_mooncake.py"


@pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None,
    reason="Mooncake is not installed: pip install 'kvelastic[remote]'",
)
def test_a_real_master_is_served_from_and_survived() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "fine"
