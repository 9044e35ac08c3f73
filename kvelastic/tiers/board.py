"""The instance's end of its tier board: the file in /dev/shm, its snapshots and its answers.

    board = Board.create(uuid)
    board.publish(figures)
    revision, request = board.next_request()       # None: nothing new
    board.answer(TierAnswer(revision, "done", (12,), ""))
    board.close()                                  # removes the file

A process that ends without closing leaves the file to `segment_dir.reap`, as its segment. Any
thread may call any method. The native latch of segments is not used. It orders the words of a
mapping for readers that share it; this is written twice a second, and read with pread() because a
mapping of a file that somebody shortens is a SIGBUS. A checksum for each cell says all that is
needed, and says it of damage, too.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvelastic import _vmm
from kvelastic import tier_board_format as board_format
from kvelastic.errors import SegmentError
from kvelastic.lease import MAKER_BYTE, hold
from kvelastic.segment_dir import SHM_DIR, board_name, inode_of
from kvelastic.tier_board import requests_in
from kvelastic.tier_board_format import BoardFigures, TierAnswer, TierRequest

_FILE_MODE: Final = 0o600
_MAKE_TRIES: Final = 100


class Board:
    """See the module. Made by `create`."""

    def __init__(self, path: Path, fd: int, life: _vmm.LifeLock | None) -> None:
        self._path = path
        self._fd = fd
        self._life = life
        self._pid = os.getpid()
        self._lock = threading.Lock()
        """Guards what is below, and the file against its own threads."""
        self._number = 0
        self._answered = 0

    @staticmethod
    def create(uuid: bytes) -> Board:
        """Make the board of the instance whose segment has this uuid.

        Raises `SegmentError` if the operating system refuses, or if there is one already.
        """
        path = SHM_DIR / board_name(uuid)
        for _ in range(_MAKE_TRIES):
            board = _make(path)
            if board is not None:
                return board
        raise SegmentError(f"files that begin in {SHM_DIR} are removed as fast as they are made")

    @property
    def answered_revision(self) -> int:
        """Of the last request that was answered, or passed over."""
        with self._lock:
            return self._answered

    def publish(self, figures: BoardFigures) -> None:
        """Show these instead of the last ones. Raises `SegmentError`."""
        with self._lock:
            self._number += 1
            cell = board_format.pack_snapshot(self._number, figures)
            self._write(cell, board_format.snapshot_at(self._number))

    def next_request(self) -> tuple[int, TierRequest] | None:
        """The oldest request that has no answer, as it was found: check it. None: there is none."""
        with self._lock:
            if self._fd < 0:
                return None
            pending = self._pending()
            # Operators write one after another, so what came before is there once a later one is
            # seen; but not yet, maybe, where this look had passed.
            if pending and min(pending) != self._answered + 1:
                pending = self._pending()
            if not pending:
                return None
            revision = min(pending)
            return revision, pending[revision]

    def _pending(self) -> dict[int, TierRequest]:
        found = requests_in(self._fd)
        return {revision: one for revision, one in found.items() if revision > self._answered}

    def answer(self, answer: TierAnswer) -> None:
        """Say what came of a request. Raises `SegmentError`."""
        with self._lock:
            self._answered = max(self._answered, answer.revision)
            cell = board_format.pack_answer(answer)
            self._write(cell, board_format.answer_at(answer.revision))

    def _write(self, cell: bytes, at: int) -> None:
        if self._fd < 0:
            return
        try:
            os.pwrite(self._fd, cell, at)
        except OSError as error:
            raise SegmentError(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Remove the file. Repeatable; a forked child leaves it where it is."""
        with self._lock:
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            if self._pid == os.getpid():
                _unlink_own(self._path, fd)
                if self._life is not None:
                    self._life.release()
            os.close(fd)


def _make(path: Path) -> Board | None:
    """None: who reaps has found the file before its lock was taken, and removed it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, _FILE_MODE)
    except OSError as error:
        raise SegmentError(f"cannot make {path}: {error.strerror}") from error
    life: _vmm.LifeLock | None = None
    try:
        os.fchmod(fd, _FILE_MODE)  # whatever the umask made of it
        os.posix_fallocate(fd, 0, board_format.FILE_BYTES)
        life = hold(path, fd, MAKER_BYTE)
        os.pwrite(fd, board_format.pack_header(), 0)
        if not path.exists():
            raise FileNotFoundError(path)
        return Board(path, fd, life)
    except BaseException as error:
        is_reaped = not path.exists()
        _unlink_own(path, fd)
        if life is not None:
            life.release()
        os.close(fd)
        if isinstance(error, (OSError, SegmentError)):
            if is_reaped:
                return None
            raise SegmentError(f"cannot make {path}: {error}") from error
        raise


def _unlink_own(path: Path, fd: int) -> None:
    with suppress(OSError):
        if inode_of(path.stat(follow_symlinks=False)) == inode_of(os.fstat(fd)):
            path.unlink()
