"""A disk that takes its time, for servers in processes of their own: `slow_disk.c`, built and set.

slow = SlowDisk(work_folder, folder)
VllmServer(..., environment=slow.environment, under=slow.under)
slow.delay(0.5)     # each record from here on
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
IO_URING_SETUP = "425"
EPERM = "1"


class SlowDisk:
    """Of the records in `folder`; what it needs lies in `work_folder`."""

    def __init__(self, work_folder: Path, folder: Path) -> None:
        self._file = work_folder / "delay_us"
        library = work_folder / "slow_disk.so"
        compiler = os.environ.get("CC", "cc")
        source = HERE / "slow_disk.c"
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
        self.environment = {
            "LD_PRELOAD": str(library),
            "SLOW_DISK_FOLDER": str(folder),
            "SLOW_DISK_FILE": str(self._file),
        }
        # Records go through the C library where io_uring is denied.
        self.under = (sys.executable, str(HERE / "forbid_io_uring.py"), IO_URING_SETUP, EPERM)

    def delay(self, seconds: float) -> None:
        """Of every read and write of a record from now on. Each reads it whole."""
        new = self._file.with_suffix(".new")
        new.write_text(str(int(seconds * 1e6)))
        new.replace(self._file)
