"""Status files: a process shows a snapshot in /dev/shm, and answers requests that it finds there.

    file = StatusFile.create(name, KIND)                     # the process
    file.publish(snapshot); file.pending(); file.answer(answer); file.close()

    with reading(name, KIND, subject, owner_uid) as fd: newest(fd, KIND, subject)    # an operator
    asked = post(fd, KIND, request, ...); asked.wait(5.0)

The bytes of a file::

    page 0          magic and version; two futex words: of requests, of answers
    2 snapshots     the process writes the older one, readers take the newer whole one
    16 requests     of operators, who share a lock; the one of a revision is at revision % 16
    16 answers      of the process, at the place of the request

A cell has a number (of a request its revision), a size, a checksum over what it is and holds, and a
body in MessagePack, which msgspec reads into the types of `StatusKind` and refuses where a value is
not of them. So a cell is whole or nothing, whichever process is killed half-way.

A file is read and written with pread() and pwrite(). Its first page is mapped for the kernel alone,
which waits on the futex words and reports a page that is gone as an error: any process of the user
may shorten the file, and a load from the mapping would then be a SIGBUS. The file is removed with
its process: by `close`, or by `segment_dir.reap`.
"""

from __future__ import annotations

import atexit
import mmap
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta

from kvelastic import _vmm
from kvelastic.errors import (
    SegmentBusyError,
    SegmentDeadError,
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
)
from kvelastic.lease import MAKER_BYTE, Liveness, hold, liveness
from kvelastic.segment_dir import (
    LOCK_WAIT_S,
    READ_FLAGS,
    SHM_DIR,
    WRITE_FLAGS,
    inode_of,
    locked,
    open_file,
)

RING: Final = 16
"""Requests and answers that there is room for."""
CELL_BYTES: Final = 1024
"""Of a request or an answer."""
MOST_REVISION: Final = 1 << 62
POLL_S: Final = 0.01
"""Between two looks for an answer, where a caller may not block."""

_HEADER: Final = struct.Struct("<8sI")
_PAGE_BYTES: Final = 4096
_REQUEST_BELL, _ANSWER_BELL = 64, 128
_CELL: Final = struct.Struct("<QI")
_SUM: Final = struct.Struct("<I")
_FILE_MODE: Final = 0o600
_OTHERS: Final = 0o077
_MAKE_TRIES: Final = 100
_READ_TRIES: Final = 100
_DEATH_CHECK_S: Final = 0.25

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Shown(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the types that stand in cells; fields are told apart by their order."""


class _Snapshot(Protocol):
    @property
    def answered_revision(self) -> int: ...


class _Answer(Protocol):
    @property
    def revision(self) -> int: ...


_S = TypeVar("_S", bound=_Snapshot)
_Q = TypeVar("_Q", bound=Shown)
_A = TypeVar("_A", bound=_Answer)
_T = TypeVar("_T")
_encoder: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class StatusKind(Generic[_S, _Q, _A]):
    """What stands in one kind of status file."""

    subject: str
    """What messages call such a file."""
    magic: bytes
    """Eight bytes."""
    version: int
    snapshot_bytes: int
    """Room for a snapshot."""
    snapshot: type[_S]
    request: type[_Q]
    answer: type[_A]

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.answer_at(0) + RING * CELL_BYTES

    @property
    def header(self) -> bytes:
        """The beginning of the file."""
        return _HEADER.pack(self.magic, self.version)

    def snapshot_at(self, number: int) -> int:
        """Where the snapshot of that number lies in the file; they alternate."""
        return _PAGE_BYTES + number % 2 * self.snapshot_bytes

    def request_at(self, revision: int) -> int:
        """Where the request of that revision lies."""
        return _PAGE_BYTES + 2 * self.snapshot_bytes + revision % RING * CELL_BYTES

    def answer_at(self, revision: int) -> int:
        """Where the answer of that revision lies."""
        return self.request_at(0) + (RING + revision % RING) * CELL_BYTES

    def pack(self, number: int, value: object) -> bytes:
        """The cell of a value. Raises `SegmentError` where the text in it is too long."""
        body = _encoder.encode(value)
        head = _CELL.pack(number, len(body))
        cell = head + self._sum(type(value), head + body) + body
        room = self.snapshot_bytes if isinstance(value, self.snapshot) else CELL_BYTES
        if len(cell) > room:
            raise SegmentError(f"the {self.subject} has no room for a cell of {len(cell)} bytes")
        return cell

    def unpack(self, of: type[_T], raw: bytes) -> tuple[int, _T] | None:
        """The number and the value of a cell; None: it is not whole, or something else."""
        start = _CELL.size + _SUM.size
        if len(raw) < start:
            return None
        number, length = _CELL.unpack_from(raw)
        head, body = raw[: _CELL.size], raw[start : start + length]
        is_whole = len(body) == length and number < MOST_REVISION
        if not is_whole or raw[_CELL.size : start] != self._sum(of, head + body):
            return None
        try:
            return number, msgspec.msgpack.decode(body, type=of)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _sum(self, of: type[object], raw: bytes) -> bytes:
        return _SUM.pack(zlib.crc32(raw, zlib.crc32(self.magic + of.__name__.encode())))


# ------------------------------------------------------------------------- the process that shows


class StatusFile(Generic[_S, _Q, _A]):
    """The owner's end. Made by `create`; any thread may call any method."""

    def __init__(
        self,
        path: Path,
        fd: int,
        kind: StatusKind[_S, _Q, _A],
        bells: mmap.mmap,
        life: _vmm.LifeLock | None,
    ) -> None:
        self._path = path
        self._fd = fd
        self._kind = kind
        self._bells = bells
        self._life = life
        self._snapshots = 0
        self._answered = 0
        self._lock = threading.Lock()
        """Guards the descriptor against `close`."""
        self._pid = os.getpid()
        atexit.register(self.close)

    @staticmethod
    def create(name: str, kind: StatusKind[_S, _Q, _A]) -> StatusFile[_S, _Q, _A]:
        """Make it. Raises `SegmentError` if the system refuses, or if there is one already."""
        path = SHM_DIR / name
        for _ in range(_MAKE_TRIES):
            file = _make(path, kind)
            if file is not None:
                return file
        raise SegmentError(f"files that begin in {SHM_DIR} are removed as fast as they are made")

    @property
    def answered_revision(self) -> int:
        """Of the last request that was answered."""
        return self._answered

    @property
    def bell(self) -> int | None:
        """The futex word of requests, which every request and every `ring` changes."""
        with self._lock:
            return _bell(self._fd, _REQUEST_BELL) if self._fd >= 0 else None

    def wait(self, seen: int | None, timeout_s: float) -> None:
        """Block until the bell is another than `seen`, for `timeout_s` at most."""
        _wait(self._bells, _REQUEST_BELL, seen, timeout_s)

    def ring(self) -> None:
        """Wake the thread that waits."""
        with self._lock, suppress(OSError):
            if self._fd >= 0:
                _ring(self._fd, self._bells, _REQUEST_BELL)

    def publish(self, snapshot: _S) -> None:
        """Show this instead of the last one. Nothing when closed. Raises `SegmentError`."""
        with self._lock:
            self._snapshots += 1
            cell = self._kind.pack(self._snapshots, snapshot)
            self._write(self._kind.header, 0)  # whatever has become of it
            self._write(cell, self._kind.snapshot_at(self._snapshots))

    def pending(self) -> dict[int, _Q]:
        """The requests without an answer, the oldest first; check them. None when it is closed."""
        with self._lock:
            if self._fd < 0:
                return {}
            found = self._later()
            # Operators write one after another, so what came before is there once a later one is
            # seen; but not yet, maybe, where this look had passed.
            if found and min(found) != self._answered + 1:
                found = self._later()
            return dict(sorted(found.items()))

    def _later(self) -> dict[int, _Q]:
        found = requests_in(self._fd, self._kind)
        last = self._answered + RING  # no operator makes a later one
        return {at: one for at, one in found.items() if self._answered < at <= last}

    def answer(self, answer: _A) -> None:
        """Answer the request of its revision. Nothing when closed. Raises `SegmentError`.

        A snapshot that calls it answered is to be published before `RING` more are answered: what
        is further ahead of the snapshot is taken for damage.
        """
        with self._lock:
            self._answered = max(self._answered, answer.revision)
            cell = self._kind.pack(answer.revision, answer)
            self._write(cell, self._kind.answer_at(answer.revision))
            if self._fd >= 0:
                _ring(self._fd, self._bells, _ANSWER_BELL)

    def _write(self, cell: bytes, at: int) -> None:
        if self._fd < 0:
            return
        try:
            os.pwrite(self._fd, cell, at)
        except OSError as error:
            raise SegmentError(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Remove the file and wake the thread that waits. Repeatable.

        A forked child leaves the file where it is.
        """
        if self._pid != os.getpid():  # the lock may be held by a thread that is not here
            return
        atexit.unregister(self.close)
        self.ring()
        with self._lock:
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            _unlink_own(self._path, fd)
            if self._life is not None:
                self._life.release()
            os.close(fd)
        with suppress(BufferError):  # a thread waits there
            self._bells.close()


def _make(path: Path, kind: StatusKind[_S, _Q, _A]) -> StatusFile[_S, _Q, _A] | None:
    """None: `reap` has found the file before its lock was taken, and removed it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, _FILE_MODE)
    except OSError as error:
        raise SegmentError(f"cannot make {path}: {error.strerror}") from error
    life: _vmm.LifeLock | None = None
    try:
        os.fchmod(fd, _FILE_MODE)  # whatever the umask made of it
        os.posix_fallocate(fd, 0, kind.file_bytes)
        life = hold(path, fd, MAKER_BYTE)
        os.pwrite(fd, kind.header, 0)
        if not path.exists():
            raise FileNotFoundError(path)
        return StatusFile(path, fd, kind, _bells_of(fd), life)
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


# ------------------------------------------------------------------------------------- futex words


def _bells_of(fd: int) -> mmap.mmap:
    """The first page, for the kernel to wait on; nothing is ever loaded from it here."""
    try:
        return mmap.mmap(fd, _PAGE_BYTES, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise SegmentError(f"cannot map the beginning of a status file: {error}") from error


def _bell(fd: int, at: int) -> int | None:
    """None: the file is shorter, and nothing can be waited for."""
    raw = os.pread(fd, _SUM.size, at)
    return int(_SUM.unpack(raw)[0]) if len(raw) == _SUM.size else None


def _ring(fd: int, bells: mmap.mmap, at: int) -> None:
    os.pwrite(fd, _SUM.pack(((_bell(fd, at) or 0) + 1) % (1 << 32)), at)
    _vmm.wake_word(bells, at)


def _wait(bells: mmap.mmap, at: int, seen: int | None, timeout_s: float) -> None:
    if seen is None:
        time.sleep(min(POLL_S, timeout_s))
        return
    with suppress(ValueError):  # closed meanwhile
        _vmm.wait_word(bells, at, seen, timeout_s)


# -------------------------------------------------------------------------------------- operators


@contextmanager
def reading(
    name: str, kind: StatusKind[_S, _Q, _A], subject: str, owner_uid: int
) -> Iterator[int | None]:
    """An open file for `newest`; None: there is none. Raises as `open_status`."""
    fd = open_status(name, kind, READ_FLAGS, subject, owner_uid)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def open_status(
    name: str, kind: StatusKind[_S, _Q, _A], flags: int, subject: str, owner_uid: int
) -> int | None:
    """A descriptor of a status file that is of that user alone; None: there is none, or not yet.

    `subject` is what messages call it. Raises `SegmentFormatError` for a file of another version
    or of another user, `SegmentError` if it cannot be opened.
    """
    try:
        fd = open_file(name, flags)
    except SegmentNotFoundError:
        return None
    try:
        state = os.fstat(fd)
        if state.st_uid != owner_uid or state.st_nlink > 1 or stat.S_IMODE(state.st_mode) & _OTHERS:
            raise SegmentFormatError(f"the {subject} is not a file of its user alone")
        head = os.pread(fd, _HEADER.size, 0)
        if head and not any(head):  # it is being made
            os.close(fd)
            return None
        magic, version = _HEADER.unpack(head.ljust(_HEADER.size, b"\0"))
        if (magic, version) != (kind.magic, kind.version):
            what = f"of version {version}" if magic == kind.magic else f"no {kind.subject}"
            raise SegmentFormatError(
                f"the {subject} is {what}; this kvelastic reads version {kind.version}"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def newest(fd: int, kind: StatusKind[_S, _Q, _A], subject: str) -> _S:
    """The newer whole snapshot. Both are torn only while one is written and one is damaged, or when
    two were written during one look; so it looks again, and not for ever.

    Raises `SegmentFormatError`.
    """
    for _ in range(_READ_TRIES):
        cells = [os.pread(fd, kind.snapshot_bytes, kind.snapshot_at(number)) for number in (0, 1)]
        found = [one for cell in cells if (one := kind.unpack(kind.snapshot, cell))]
        if found:
            return max(found, key=lambda snapshot: snapshot[0])[1]
    raise SegmentFormatError(
        f"the {subject} is damaged; its process writes it again within a second"
    )


def requests_in(fd: int, kind: StatusKind[_S, _Q, _A]) -> dict[int, _Q]:
    """Every whole request in an open file, by its revision."""
    return _ring_of(fd, kind, kind.request, kind.request_at(0))


def _ring_of(fd: int, kind: StatusKind[_S, _Q, _A], of: type[_T], at: int) -> dict[int, _T]:
    """All cells of a ring, read by one system call."""
    raw = os.pread(fd, RING * CELL_BYTES, at)
    cells = (raw[place : place + CELL_BYTES] for place in range(0, len(raw), CELL_BYTES))
    return dict(one for cell in cells if (one := kind.unpack(of, cell)))


def check_alive(fd: int, subject: str, consequence: str) -> None:
    """Raises `SegmentDeadError` where there will be no answer any more."""
    if liveness(fd, MAKER_BYTE) is Liveness.DEAD or os.fstat(fd).st_nlink == 0:
        raise SegmentDeadError(f"the {subject} have ended; {consequence}")


class Asked(Generic[_A]):
    """A request that was written, and the place of its answer. For one thread at a time."""

    def __init__(
        self, fd: int, kind: StatusKind[Any, Any, _A], bells: mmap.mmap, revision: int, subject: str
    ) -> None:
        """Takes the descriptor over."""
        self.is_lost = False
        """The answer was written over by that to a later request; there will be none."""
        self._fd = fd
        self._kind = kind
        self._bells = bells
        self._revision = revision
        self._subject = subject
        self._check_s = time.monotonic() + _DEATH_CHECK_S

    def look(self) -> _A | None:
        """The answer if there is one; never waits. Raises `SegmentDeadError` if there cannot be."""
        raw = os.pread(self._fd, CELL_BYTES, self._kind.answer_at(self._revision))
        found = self._kind.unpack(self._kind.answer, raw)
        if found is not None and found[0] >= self._revision:
            self.is_lost = found[0] != self._revision
            return None if self.is_lost else found[1]
        if time.monotonic() >= self._check_s:
            check_alive(self._fd, self._subject, "it did not answer")
            self._check_s = time.monotonic() + _DEATH_CHECK_S
        return None

    def wait(self, wait_s: float) -> _A | None:
        """The answer; None: it has not come in time, or is lost. Blocks. Raises as `look`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            seen = _bell(self._fd, _ANSWER_BELL)
            answer, now_s = self.look(), time.monotonic()
            if answer is not None or self.is_lost or now_s >= deadline_s:
                return answer
            _wait(self._bells, _ANSWER_BELL, seen, min(_DEATH_CHECK_S, deadline_s - now_s))

    def close(self) -> None:
        """Let go of the file. Repeatable."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._bells.close()
            os.close(fd)

    def __enter__(self) -> Asked[_A]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def post(
    name: str,
    kind: StatusKind[_S, _Q, _A],
    request: _Q,
    *,
    owner_uid: int,
    title: str,
    lock_name: str,
    subject: str,
    check: Callable[[_S], None] = lambda _: None,
) -> Asked[_A] | None:
    """Write a request, and return what waits for its answer. None: there is no such file.

    `check` may refuse the newest snapshot. Blocks for milliseconds: operators share the lock of the
    file, which messages call `lock_name`; they call the file `title`, and what its process shows
    `subject`. Raises `SegmentBusyError` where others have asked as much as there is room for,
    `SegmentDeadError`, and as `open_status`.
    """
    fd = open_status(name, kind, WRITE_FLAGS, title, owner_uid)
    if fd is None:
        return None
    try:
        check_alive(fd, subject, "nothing was asked")
        check(newest(fd, kind, title))
        bells = _bells_of(fd)
        with locked(fd, lock_name, LOCK_WAIT_S):
            answers = _ring_of(fd, kind, kind.answer, kind.answer_at(0))
            last = _last_of(answers, newest(fd, kind, title).answered_revision)
            revision = _last_of(requests_in(fd, kind), last) + 1
            if revision - last > RING:
                raise SegmentBusyError(
                    f"{RING} requests to the {subject} wait for an answer already; nothing was"
                    " asked"
                )
            try:
                os.pwrite(fd, kind.pack(revision, request), kind.request_at(revision))
                _ring(fd, bells, _REQUEST_BELL)
            except OSError as error:
                raise SegmentError(f"cannot write the {title}: {error}") from error
        return Asked(fd, kind, bells, revision, subject)
    except BaseException:
        os.close(fd)
        raise


def _last_of(revisions: dict[int, _T], base: int) -> int:
    """The last revision that can be from `base` on; a later one stands there by damage, or lies.

    Taken for true it would be the end of all requests: the owner answers no revision so late.
    """
    return max((one for one in revisions if base < one <= base + RING), default=base)
