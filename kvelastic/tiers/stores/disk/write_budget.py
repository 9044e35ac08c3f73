"""A daily write budget for a disk that wears out, kept across restarts."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvelastic.file_lock import lock_within
from kvelastic.tiers.owned_files import open_file

_FILE: Final = ".written"
_COUNT: Final = struct.Struct("<QQ")
_DAY_S: Final = 86400
_LOCK_WAIT_S: Final = 0.25


class WriteBudget:
    """The bytes that all engines of a folder have written today (UTC), with an optional limit.

    The count is in a file in the folder and is not synced, so a power loss may lose some of it.
    Guarded by the owner's lock. A call locks the file for microseconds. If another engine is
    suspended while it holds the file lock, this engine uses its own last count until the lock is
    released.
    """

    def __init__(self, folder: int, daily_bytes: int | None, today_s: Callable[[], float]) -> None:
        self._daily_bytes = daily_bytes
        self._today_s = today_s
        self._fd = -1
        self._own = (0, 0)  # last known day and bytes, used if the file is not available
        self._is_locked = False
        if daily_bytes is not None and folder >= 0:
            with suppress(OSError):
                self._fd = open_file(folder, _FILE, os.O_RDWR | os.O_CREAT)

    def take(self, records: int, record_bytes: int) -> int:
        """Return how many of `records` may be written, and count these as written."""
        if self._daily_bytes is None or records == 0:
            return records
        today = max(0, int(self._today_s())) // _DAY_S
        day, written = self._read()
        if day != today:
            written = 0
        granted = max(0, min(records, (self._daily_bytes - written) // record_bytes))
        self._write(today, written + granted * record_bytes)
        return granted

    def give_back(self, records: int, record_bytes: int) -> None:
        """Return records to the budget that were taken but not written."""
        if self._daily_bytes is not None and records > 0:
            day, written = self._read()
            self._write(day, max(0, written - records * record_bytes))

    def left(self) -> tuple[int, int] | None:
        """Return the daily limit and the remaining bytes of today. None: no limit."""
        if self._daily_bytes is None:
            return None
        day, written = self._own
        if self._fd >= 0:
            with suppress(OSError):
                raw = os.pread(self._fd, _COUNT.size, 0)
                if len(raw) == _COUNT.size:
                    day, written = max(_COUNT.unpack(raw), self._own)
        if day != int(self._today_s()) // _DAY_S:
            written = 0
        return self._daily_bytes, max(0, self._daily_bytes - written)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> tuple[int, int]:
        """Return the day and its written bytes. Keeps the file locked until `_write`.

        Waits at most 0.25 s for the lock. On timeout, or without the file, returns this
        engine's last count.
        """
        if self._fd >= 0:
            with suppress(OSError):
                self._is_locked = lock_within(self._fd, _LOCK_WAIT_S)
                if not self._is_locked:
                    return self._own
                raw = os.pread(self._fd, _COUNT.size, 0)
                if len(raw) == _COUNT.size:
                    day, written = _COUNT.unpack(raw)
                    return max((day, written), self._own)
        return self._own

    def _write(self, day: int, written: int) -> None:
        self._own = (day, written)
        if self._fd >= 0 and self._is_locked:
            self._is_locked = False
            with suppress(OSError):
                os.pwrite(self._fd, _COUNT.pack(day, written), 0)
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
