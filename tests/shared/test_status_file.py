"""Status files as a format: cells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from waiting import DEADLINE_S

PROGRAM = Path(__file__).parents[1] / "programs" / "first_decodes.py"


def test_threads_decode_a_new_type_at_once() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "500"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
