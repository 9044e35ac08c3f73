"""Status files: their making, and their format."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from waiting import DEADLINE_S

from kvelastic._vmm import LivenessLock
from kvelastic.errors import SegmentError
from kvelastic.shared import segment_listing
from kvelastic.shared.link_status import KIND
from kvelastic.shared.segment_listing import SHM_DIR, link_status_name, make_file
from kvelastic.shared.status_file import StatusFile

PROGRAM = Path(__file__).parents[1] / "programs" / "first_decodes.py"


def test_threads_decode_a_new_type_at_once() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "500"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


def test_status_file_reaped_too_early_is_recreated(monkeypatch: pytest.MonkeyPatch) -> None:
    """`reap` looks before the file has its lock, and removes the file after that."""
    path = SHM_DIR / link_status_name(os.urandom(16))
    reaped: list[Path] = []

    def make_and_reap(made: Path, size_bytes: int) -> tuple[int, LivenessLock | None]:
        result = make_file(made, size_bytes)
        if not reaped:
            reaped.append(made)
            made.unlink()
        return result

    monkeypatch.setattr(segment_listing, "make_file", make_and_reap)
    with closing(StatusFile.create(path.name, KIND)):
        assert path.exists()
        with pytest.raises(SegmentError, match="cannot make"):
            StatusFile.create(path.name, KIND)
        assert path.exists()
    assert not path.exists()
