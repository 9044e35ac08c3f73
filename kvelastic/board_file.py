"""Files of boards in /dev/shm: made and written by the process that shows, read by operators.

    board = BoardFile.create(".kvelastic_tiers_...", LAYOUT)     # the process
    board.publish(pack_snapshot); board.close()

    fd = open_board(name, LAYOUT, READ_FLAGS, subject, owner_uid)   # an operator
    newest(fd, LAYOUT, unpack_snapshot, subject)

A file goes with its process: by itself at the end, or by `segment_dir.reap` when that is dead. It
is read with pread(), never mapped: who may write to it may also shorten it, and a mapping would be
a SIGBUS then. What is in the cells is the business of `*_board_format`.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from kvelastic import _vmm
from kvelastic.board_layout import CELL_BYTES, RING, SNAPSHOTS, BoardLayout
from kvelastic.errors import (
    SegmentBusyError,
    SegmentDeadError,
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
)
from kvelastic.lease import MAKER_BYTE, Liveness, hold, liveness
from kvelastic.segment_dir import LOCK_WAIT_S, SHM_DIR, inode_of, locked, open_file

_FILE_MODE: Final = 0o600
_OTHERS: Final = 0o077
_MAKE_TRIES: Final = 100
_READ_TRIES: Final = 100
_DEATH_CHECK_S: Final = 0.25
POLL_S: Final = 0.01
"""Between two looks for an answer."""

_T = TypeVar("_T")
_A = TypeVar("_A", bound="_Revised")


class _Revised(Protocol):
    @property
    def revision(self) -> int: ...


# ------------------------------------------------------------------------- the process that shows


class BoardFile:
    """The owner's end. Made by `create`; for one thread at a time."""

    def __init__(
        self, path: Path, fd: int, layout: BoardLayout, life: _vmm.LifeLock | None
    ) -> None:
        self._path = path
        self._fd = fd
        self._layout = layout
        self._life = life
        self._snapshots = 0
        self._pid = os.getpid()

    @staticmethod
    def create(name: str, layout: BoardLayout) -> BoardFile:
        """Make it. Raises `SegmentError` if the system refuses, or if there is one already."""
        path = SHM_DIR / name
        for _ in range(_MAKE_TRIES):
            board = _make(path, layout)
            if board is not None:
                return board
        raise SegmentError(f"files that begin in {SHM_DIR} are removed as fast as they are made")

    def publish(self, pack: Callable[[int], bytes]) -> None:
        """Show what `pack` makes of the snapshot's number instead of the last one.

        Nothing when it is closed. Raises `SegmentError`.
        """
        self._snapshots += 1
        self._write(self._layout.pack_header(), 0)  # whatever has become of it
        self._write(pack(self._snapshots), self._layout.snapshot_at(self._snapshots))

    def answer(self, revision: int, cell: bytes) -> None:
        """Answer the request of that revision. Nothing when closed. Raises `SegmentError`.

        Figures that call it answered are to be published before `RING` more are answered: what is
        further ahead of them is taken for damage.
        """
        self._write(cell, self._layout.answer_at(revision))

    def pending(
        self, unpack: Callable[[bytes], tuple[int, _T] | None], answered: int
    ) -> dict[int, _T]:
        """The requests later than `answered`, the oldest first; none when it is closed."""
        if self._fd < 0:
            return {}
        found = self._later(unpack, answered)
        # Operators write one after another, so what came before is there once a later one is seen;
        # but not yet, maybe, where this look had passed.
        if found and min(found) != answered + 1:
            found = self._later(unpack, answered)
        return dict(sorted(found.items()))

    def _later(
        self, unpack: Callable[[bytes], tuple[int, _T] | None], answered: int
    ) -> dict[int, _T]:
        found = requests_in(self._fd, self._layout, unpack)
        last = answered + RING  # no operator asks for a later one; after it nothing would be asked
        return {at: one for at, one in found.items() if answered < at <= last}

    def _write(self, cell: bytes, at: int) -> None:
        if self._fd < 0:
            return
        try:
            os.pwrite(self._fd, cell, at)
        except OSError as error:
            raise SegmentError(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Remove the file. Repeatable; a forked child leaves it where it is."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        if self._pid == os.getpid():
            _unlink_own(self._path, fd)
            if self._life is not None:
                self._life.release()
        os.close(fd)


def _make(path: Path, layout: BoardLayout) -> BoardFile | None:
    """None: who reaps has found the file before its lock was taken, and removed it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, _FILE_MODE)
    except OSError as error:
        raise SegmentError(f"cannot make {path}: {error.strerror}") from error
    life: _vmm.LifeLock | None = None
    try:
        os.fchmod(fd, _FILE_MODE)  # whatever the umask made of it
        os.posix_fallocate(fd, 0, layout.file_bytes)
        life = hold(path, fd, MAKER_BYTE)
        os.pwrite(fd, layout.pack_header(), 0)
        if not path.exists():
            raise FileNotFoundError(path)
        return BoardFile(path, fd, layout, life)
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


# -------------------------------------------------------------------------------------- operators


def open_board(
    name: str, layout: BoardLayout, flags: int, subject: str, owner_uid: int
) -> int | None:
    """A descriptor of a board that is a file of that user alone; None: there is none, or not yet.

    `subject` is what messages call it. Raises `SegmentFormatError` for a board of another version
    or of somebody else, `SegmentError` if it cannot be opened.
    """
    try:
        fd = open_file(name, flags)
    except SegmentNotFoundError:
        return None
    try:
        state = os.fstat(fd)
        if state.st_uid != owner_uid or state.st_nlink > 1 or stat.S_IMODE(state.st_mode) & _OTHERS:
            raise SegmentFormatError(f"the {subject} is not a file of its user alone")
        head = os.pread(fd, 16, 0)
        if head and not any(head):  # it is being made
            os.close(fd)
            return None
        version = layout.version_of(head)
        if version != layout.version:
            what = "no board" if version is None else f"of version {version}"
            raise SegmentFormatError(
                f"the {subject} is {what}; this kvelastic reads version {layout.version}"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def newest(
    fd: int, layout: BoardLayout, unpack: Callable[[bytes], tuple[int, _T] | None], subject: str
) -> _T:
    """The newer whole snapshot. Both are torn only while one is written and one is damaged, or when
    two were written during one look; so it looks again, and not for ever.

    Raises `SegmentFormatError`.
    """
    for _ in range(_READ_TRIES):
        found = [
            snapshot
            for number in range(SNAPSHOTS)
            if (snapshot := unpack(os.pread(fd, layout.snapshot_bytes, layout.snapshot_at(number))))
        ]
        if found:
            return max(found, key=lambda snapshot: snapshot[0])[1]
    raise SegmentFormatError(
        f"the {subject} is damaged; its process writes it again within a second"
    )


def requests_in(
    fd: int, layout: BoardLayout, unpack: Callable[[bytes], tuple[int, _T] | None]
) -> dict[int, _T]:
    """Every whole request in an open board, by its revision."""
    found = (unpack(cell) for cell in _ring(fd, layout.request_at(0)))
    return dict(one for one in found if one is not None)


def _ring(fd: int, at: int) -> list[bytes]:
    """All cells of a ring, read by one system call."""
    raw = os.pread(fd, RING * CELL_BYTES, at)
    return [raw[place : place + CELL_BYTES] for place in range(0, len(raw), CELL_BYTES)]


def check_alive(fd: int, subject: str, consequence: str) -> None:
    """Raises `SegmentDeadError` where nobody will answer any more."""
    if liveness(fd, MAKER_BYTE) is Liveness.DEAD or os.fstat(fd).st_nlink == 0:
        raise SegmentDeadError(f"the {subject} have ended; {consequence}")


class Asked(Generic[_A]):
    """A request that was written, and the place of its answer. For one thread at a time."""

    def __init__(
        self,
        fd: int,
        layout: BoardLayout,
        unpack: Callable[[bytes], _A | None],
        revision: int,
        subject: str,
    ) -> None:
        """Takes the descriptor over."""
        self.is_lost = False
        """The answer was written over by that to a later request; there will be none."""
        self._fd = fd
        self._layout = layout
        self._unpack = unpack
        self._revision = revision
        self._subject = subject
        self._check_s = time.monotonic() + _DEATH_CHECK_S

    def look(self) -> _A | None:
        """The answer if there is one; never waits. Raises `SegmentDeadError` if there cannot be."""
        raw = os.pread(self._fd, CELL_BYTES, self._layout.answer_at(self._revision))
        answer = self._unpack(raw)
        if answer is not None and answer.revision >= self._revision:
            self.is_lost = answer.revision != self._revision
            return None if self.is_lost else answer
        if time.monotonic() >= self._check_s:
            check_alive(self._fd, self._subject, "it did not answer")
            self._check_s = time.monotonic() + _DEATH_CHECK_S
        return None

    def wait(self, wait_s: float) -> _A | None:
        """The answer; None: it has not come in time, or is lost. Blocks. Raises as `look`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            answer, now_s = self.look(), time.monotonic()
            if answer is not None or self.is_lost or now_s >= deadline_s:
                return answer
            time.sleep(min(POLL_S, deadline_s - now_s))

    def close(self) -> None:
        """Let go of the board. Repeatable."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Asked[_A]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def post(
    fd: int,
    layout: BoardLayout,
    pack: Callable[[int], bytes],
    unpack_request: Callable[[bytes], tuple[int, object] | None],
    unpack_answer: Callable[[bytes], _A | None],
    *,
    answered: Callable[[], int],
    lock_name: str,
    subject: str,
) -> Asked[_A]:
    """Write what `pack` makes of the next revision as a request, and return what waits for it.

    Takes the descriptor over, unless it raises. `answered` is the last revision that the owner's
    figures call answered. Blocks for milliseconds: operators share the lock of the file, which
    messages call `lock_name`. Raises `SegmentBusyError` where others have asked as much as there is
    room for, `SegmentError`.
    """
    with locked(fd, lock_name, LOCK_WAIT_S):
        cells = [unpack_answer(cell) for cell in _ring(fd, layout.answer_at(0))]
        answers = [one.revision for one in cells if one is not None]
        last = _last_of(answers, answered())
        revision = _last_of(requests_in(fd, layout, unpack_request), last) + 1
        if revision - last > RING:
            raise SegmentBusyError(
                f"{RING} requests to the {subject} wait for an answer already; nothing was asked"
            )
        try:
            os.pwrite(fd, pack(revision), layout.request_at(revision))
        except OSError as error:
            raise SegmentError(f"cannot write to the board of the {subject}: {error}") from error
    return Asked(fd, layout, unpack_answer, revision, subject)


def _last_of(revisions: Iterable[int], base: int) -> int:
    """The last revision that can be from `base` on; a later one stands there by damage, or lies.

    Taken for true it would be the end of all requests: the owner answers no revision so late.
    """
    return max((one for one in revisions if base < one <= base + RING), default=base)
