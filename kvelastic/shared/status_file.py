"""Status files: a process publishes a snapshot in /dev/shm and handles requests written there.

    file = StatusFile.create(name, KIND)                     # the process
    file.publish(snapshot); file.pending(); file.answer(answer); file.close()

    with reading(name, KIND, subject, owner_uid) as fd: newest(fd, KIND, subject)    # an operator
    asked = post(fd, KIND, request, ...); asked.wait(5.0)

The bytes of a file::

    page 0          magic and version; two futex words: of requests, of results
    2 snapshots     the process writes the older one; readers take the newer complete one
    16 requests     of operators, who share a lock; slot = revision % 16
    16 results      of the process, in the slot of the request

A cell holds a number (for a request, its revision), a size, a checksum over its type and content,
and a body in MessagePack. msgspec decodes the body into a type of `StatusKind` and rejects values
of other types. So a reader gets a complete cell or none, even if the writer is killed during a
write.

Files are read and written with pread() and pwrite(). Only the kernel uses the mapping of page 0, to
wait on the futex words; it reports a missing page as an error. Any process of the user may truncate
the file, and a load from the mapping would then raise SIGBUS. `close` removes the file; after a
crash, `segment_listing.reap` does.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta

from kvelastic import _vmm
from kvelastic.closing import Closing
from kvelastic.errors import (
    SegmentBusyError,
    SegmentDeadError,
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
)
from kvelastic.shared.liveness import MAKER_BYTE, Liveness, liveness
from kvelastic.shared.segment_listing import (
    LOCK_WAIT_S,
    READ_FLAGS,
    SHM_DIR,
    WRITE_FLAGS,
    locked,
    open_file,
    unfinished_file,
    unlink_own,
)

RING: Final = 16
"""Number of slots for requests, and for results."""
CELL_BYTES: Final = 1024
"""Size of the cell of a request or a result."""
MOST_REVISION: Final = 1 << 62
POLL_S: Final = 0.01
"""Interval between polls for a result, used if waiting on the futex is not possible."""

_HEADER: Final = struct.Struct("<8sI")
_PAGE_BYTES: Final = 4096
_REQUEST_BELL, _ANSWER_BELL = 64, 128
_CELL: Final = struct.Struct("<QI")
_SUM: Final = struct.Struct("<I")
_OTHERS: Final = 0o077
_READ_TRIES: Final = 100
_MAKE_TRIES: Final = 100
_DEATH_CHECK_S: Final = 0.25

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Shown(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of the types in cells. Fields are encoded by position, without names."""


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
    """Format of one kind of status file."""

    subject: str
    """The name of such a file in messages."""
    magic: bytes
    """Eight bytes."""
    version: int
    snapshot_bytes: int
    """Size of the cell of a snapshot."""
    snapshot: type[_S]
    request: type[_Q]
    answer: type[_A]
    _decoders: dict[type[object], msgspec.msgpack.Decoder[Any]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # Not at the first decode: two threads that decode a new type at once crash in msgspec.
        types = (self.snapshot, self.request, self.answer)
        decoders = {of: msgspec.msgpack.Decoder(of) for of in types}
        object.__setattr__(self, "_decoders", decoders)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.answer_at(0) + RING * CELL_BYTES

    @property
    def header(self) -> bytes:
        """The beginning of the file."""
        return _HEADER.pack(self.magic, self.version)

    def snapshot_at(self, number: int) -> int:
        """Return the offset of snapshot `number`; snapshots alternate between two cells."""
        return _PAGE_BYTES + number % 2 * self.snapshot_bytes

    def request_at(self, revision: int) -> int:
        """Return the offset of the request with that revision."""
        return _PAGE_BYTES + 2 * self.snapshot_bytes + revision % RING * CELL_BYTES

    def answer_at(self, revision: int) -> int:
        """Return the offset of the result with that revision."""
        return self.request_at(0) + (RING + revision % RING) * CELL_BYTES

    def pack(self, number: int, value: object) -> bytes:
        """Encode a value as a cell. Raises `SegmentError` if the cell would be too large."""
        body = _encoder.encode(value)
        head = _CELL.pack(number, len(body))
        cell = head + self._sum(type(value), head + body) + body
        room = self.snapshot_bytes if isinstance(value, self.snapshot) else CELL_BYTES
        if len(cell) > room:
            raise SegmentError(f"the {self.subject} has no room for a cell of {len(cell)} bytes")
        return cell

    def unpack(self, of: type[_T], raw: bytes) -> tuple[int, _T] | None:
        """Decode a cell to its number and value; None if it is incomplete or of another type."""
        start = _CELL.size + _SUM.size
        if len(raw) < start:
            return None
        number, length = _CELL.unpack_from(raw)
        head, body = raw[: _CELL.size], raw[start : start + length]
        is_whole = len(body) == length and number < MOST_REVISION
        if not is_whole or raw[_CELL.size : start] != self._sum(of, head + body):
            return None
        try:
            return number, self._decoders[of].decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _sum(self, of: type[object], raw: bytes) -> bytes:
        return _SUM.pack(zlib.crc32(raw, zlib.crc32(self.magic + of.__name__.encode())))


# ------------------------------------------------------------------------- the publishing process


class StatusFile(Generic[_S, _Q, _A]):
    """The publishing process's end, returned by `create`. All methods are thread-safe."""

    def __init__(
        self,
        path: Path,
        fd: int,
        kind: StatusKind[_S, _Q, _A],
        bells: mmap.mmap,
        lock: _vmm.LivenessLock | None,
    ) -> None:
        self._path = path
        self._fd = fd
        self._kind = kind
        self._bells = bells
        self._liveness_lock = lock
        self._snapshots = 0
        self._answered = 0
        self._lock = threading.Lock()
        """Guards the descriptor against `close`."""
        self._pid = os.getpid()
        atexit.register(self.close)

    @staticmethod
    def create(name: str, kind: StatusKind[_S, _Q, _A]) -> StatusFile[_S, _Q, _A]:
        """Create the file. Raises `SegmentError` if the system refuses or the file exists."""
        path = SHM_DIR / name
        try:
            for _ in range(_MAKE_TRIES):
                with suppress(FileNotFoundError):  # another process reaped the unfinished file
                    return _make(path, kind)
        except SegmentError:
            raise
        except OSError as error:
            raise SegmentError(f"cannot make {path}: {error}") from error
        raise SegmentError(f"files that begin in {SHM_DIR} are removed as fast as they are made")

    @property
    def answered_revision(self) -> int:
        """Revision of the last request with a result."""
        return self._answered

    @property
    def bell(self) -> int | None:
        """The futex word of requests; each request and each `ring` changes it. None if unusable."""
        with self._lock:
            return _bell(self._fd, _REQUEST_BELL) if self._fd >= 0 else None

    def wait(self, seen: int | None, timeout_s: float) -> None:
        """Block until the bell differs from `seen`, for at most `timeout_s` seconds."""
        _wait(self._bells, _REQUEST_BELL, seen, timeout_s)

    def ring(self) -> None:
        """Wake the thread in `wait`."""
        with self._lock, suppress(OSError):
            if self._fd >= 0:
                _ring(self._fd, self._bells, _REQUEST_BELL)

    def publish(self, snapshot: _S) -> None:
        """Replace the published snapshot. Does nothing if closed. Raises `SegmentError`."""
        with self._lock:
            self._snapshots += 1
            cell = self._kind.pack(self._snapshots, snapshot)
            self._write(self._kind.header, 0)  # repairs a damaged header
            self._write(cell, self._kind.snapshot_at(self._snapshots))

    def pending(self) -> dict[int, _Q]:
        """Return the requests without a result, oldest first; empty if closed.

        The caller must validate the requests.
        """
        with self._lock:
            if self._fd < 0:
                return {}
            found = self._later()
            # Operators write one after another. So once a later request is visible, the earlier
            # ones are in the file, but this read may have passed their slots before that.
            if found and min(found) != self._answered + 1:
                found = self._later()
            return dict(sorted(found.items()))

    def _later(self) -> dict[int, _Q]:
        found = requests_in(self._fd, self._kind)
        last = self._answered + RING  # operators write no later revision
        return {at: one for at, one in found.items() if self._answered < at <= last}

    def answer(self, answer: _A) -> None:
        """Publish the result of a request. Does nothing if closed. Raises `SegmentError`.

        Publish a snapshot with this `answered_revision` before `RING` more results. Operators treat
        revisions further ahead of the snapshot as damage.
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
        """Remove the file and wake the thread in `wait`. Idempotent.

        Does nothing in a forked child.
        """
        if self._pid != os.getpid():  # a thread of the parent may have held the lock at the fork
            return
        atexit.unregister(self.close)
        self.ring()
        with self._lock:
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            unlink_own(self._path, fd)
            if self._liveness_lock is not None:
                self._liveness_lock.release()
            os.close(fd)
        with suppress(BufferError):  # a thread is waiting there
            self._bells.close()


def _make(path: Path, kind: StatusKind[_S, _Q, _A]) -> StatusFile[_S, _Q, _A]:
    """Make the file. It is complete and locked before it gets its name, so `reap` keeps it."""
    with unfinished_file("status", kind.file_bytes) as (temporary, fd, lock):
        try:
            os.pwrite(fd, kind.header, 0)
            os.link(temporary, path, follow_symlinks=False)
            return StatusFile(path, fd, kind, _bells_of(fd), lock)
        except BaseException:
            unlink_own(path, fd)
            raise


# ------------------------------------------------------------------------------------- futex words


def _bells_of(fd: int) -> mmap.mmap:
    """Map the first page for futex waits; this process never loads from the mapping."""
    try:
        return mmap.mmap(fd, _PAGE_BYTES, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise SegmentError(f"cannot map the beginning of a status file: {error}") from error


def _bell(fd: int, at: int) -> int | None:
    """Return a futex word, or None if the file was truncated and waiting is not possible."""
    raw = os.pread(fd, _SUM.size, at)
    return int(_SUM.unpack(raw)[0]) if len(raw) == _SUM.size else None


def _ring(fd: int, bells: mmap.mmap, at: int) -> None:
    os.pwrite(fd, _SUM.pack(((_bell(fd, at) or 0) + 1) % (1 << 32)), at)
    _vmm.wake_word(bells, at)


def _wait(bells: mmap.mmap, at: int, seen: int | None, timeout_s: float) -> None:
    if seen is None:
        time.sleep(min(POLL_S, timeout_s))
        return
    with suppress(ValueError):  # closed during the call
        _vmm.wait_word(bells, at, seen, timeout_s)


# -------------------------------------------------------------------------------------- operators


@contextmanager
def reading(
    name: str, kind: StatusKind[_S, _Q, _A], subject: str, owner_uid: int | None
) -> Iterator[int | None]:
    """Yield a descriptor for `newest`, or None if there is no file. Raises as `open_status`."""
    fd = open_status(name, kind, READ_FLAGS, subject, owner_uid)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def open_status(
    name: str, kind: StatusKind[_S, _Q, _A], flags: int, subject: str, owner_uid: int | None
) -> int | None:
    """Open a status file that only `owner_uid` can access; None if missing or incomplete.

    If `owner_uid` is None, any user may own it: root reads the files of every user.

    `subject` names the file in messages. Raises `SegmentFormatError` if the file has another
    version, or if another user owns it or may access it. Raises `SegmentError` if it cannot be
    opened.
    """
    try:
        fd = open_file(name, flags)
    except SegmentNotFoundError:
        return None
    try:
        state = os.fstat(fd)
        is_others = owner_uid not in {None, state.st_uid}
        if is_others or state.st_nlink > 1 or stat.S_IMODE(state.st_mode) & _OTHERS:
            raise SegmentFormatError(f"the {subject} is not a file of its user alone")
        head = os.pread(fd, _HEADER.size, 0)
        if head and not any(head):  # it is still being created
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
    """Return the newest complete snapshot.

    Neither snapshot is complete if one is damaged while the other is written, or if both were
    written during one read. So this reads again, up to `_READ_TRIES` times. Raises
    `SegmentFormatError`.
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
    """Return the complete requests in an open file, by revision."""
    return _ring_of(fd, kind, kind.request, kind.request_at(0))


def _ring_of(fd: int, kind: StatusKind[_S, _Q, _A], of: type[_T], at: int) -> dict[int, _T]:
    """Return the complete cells of a ring, by number. Makes one system call."""
    raw = os.pread(fd, RING * CELL_BYTES, at)
    cells = (raw[offset : offset + CELL_BYTES] for offset in range(0, len(raw), CELL_BYTES))
    return dict(one for cell in cells if (one := kind.unpack(of, cell)))


def check_alive(fd: int, subject: str, consequence: str) -> None:
    """Raise `SegmentDeadError` if the process has ended, so that no result can follow."""
    if liveness(fd, MAKER_BYTE) is Liveness.DEAD or os.fstat(fd).st_nlink == 0:
        raise SegmentDeadError(f"the {subject} have ended; {consequence}")


class Asked(Closing, Generic[_A]):
    """A written request whose result can be awaited. Use it from one thread at a time."""

    def __init__(
        self, fd: int, kind: StatusKind[Any, Any, _A], bells: mmap.mmap, revision: int, subject: str
    ) -> None:
        """Take ownership of `fd` and `bells`."""
        self.is_lost = False
        """True if the result of a later request has overwritten this result."""
        self._fd = fd
        self._kind = kind
        self._bells = bells
        self._revision = revision
        self._subject = subject
        self._check_s = time.monotonic() + _DEATH_CHECK_S

    def look(self) -> _A | None:
        """Return the result, or None if it is not available yet. Never blocks.

        Raises `SegmentDeadError` if the process has ended.
        """
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
        """Return the result; None after `wait_s` seconds, or if it is lost. Raises as `look`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            seen = _bell(self._fd, _ANSWER_BELL)
            answer, now_s = self.look(), time.monotonic()
            if answer is not None or self.is_lost or now_s >= deadline_s:
                return answer
            _wait(self._bells, _ANSWER_BELL, seen, min(_DEATH_CHECK_S, deadline_s - now_s))

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._bells.close()
            os.close(fd)


def post(
    name: str,
    kind: StatusKind[_S, _Q, _A],
    request: _Q,
    *,
    owner_uid: int | None,
    title: str,
    lock_name: str,
    subject: str,
    check: Callable[[_S], None] = lambda _: None,
) -> Asked[_A] | None:
    """Write a request; return an object that awaits its result, or None if there is no file.

    `check` may raise to reject the newest snapshot. Blocks for milliseconds, because operators
    share the file's lock. Messages use `lock_name` for the lock, `title` for the file, and
    `subject` for what its process publishes. Raises `SegmentBusyError` if `RING` requests are
    already pending or another process holds the lock, `SegmentDeadError` if the process has ended,
    and the errors of `open_status`.
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
    """Return the last plausible revision: from `base` to `base + RING`.

    A later one is damaged or forged. If it were accepted, every further request would be lost,
    because the owner handles no revision that large.
    """
    return max((one for one in revisions if base < one <= base + RING), default=base)
