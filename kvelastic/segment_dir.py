"""The directory of segments, /dev/shm: find them, look at them, remove what is dead.

    for info in list_segments(): print(info.name, info.status)
    reap()                       # every kvctl and every instance does this when it starts

Whoever removes a segment that is not his own holds a lock on the *file* while he looks at it and
unlinks it, so he cannot hit a new one of the same name. The lock is flock(): a holder that dies
loses it by itself. An instance takes it only to end, and never waits long.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kvelastic import _vmm
from kvelastic.errors import (
    SegmentBusyError,
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
    is_out_of_descriptors,
)
from kvelastic.lease import MAKER_BYTE, SCHEDULER_BYTE, Liveness, ProcessIdentity, liveness

SHM_DIR: Final = Path("/dev/shm")
LOCK_WAIT_S: Final = 1.0
"""How long one holder of a segment's lock waits for another, who needs it for microseconds."""

READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_TEMPORARY_PREFIX: Final = ".kvelastic_new_"
_TEMPORARY: Final = re.compile(r"\.kvelastic_new_(segment|ledger)_[0-9a-f]{12}")
_TIER_STATUS: Final = re.compile(r"\.kvelastic_tiers_[0-9a-f]{32}")
LINK_STATUS: Final = re.compile(r"\.kvelastic_links_[0-9a-f]{32}")
_NO_SEGMENTS: Final = (_TEMPORARY_PREFIX, ".kvelastic_tiers_", ".kvelastic_links_")
_COPY_BYTES: Final = 4 * _vmm.SEGMENT_BYTES


@dataclass(frozen=True)
class SegmentInfo:
    """One segment as it was found. The dicts are those of `_vmm.Record`, empty if unreadable."""

    name: str
    """Of the file in /dev/shm, which is what every command takes."""
    status: str
    """alive, closing, dead, unknown (nobody can be asked) or unreadable (see `problem`)."""
    problem: str = ""
    is_ours: bool = True
    """Whether the file belongs to this user."""
    header: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    engine_asleep: bool | None = None
    """Whether the engine itself sleeps; None where it has not said."""

    @property
    def is_alive(self) -> bool:
        """Whether its instance may still answer."""
        return self.status in {"alive", "closing", "unknown"}

    @property
    def is_reapable(self) -> bool:
        """Whether `reap` may remove it: dead for certain, and this user's own."""
        return self.status == "dead" and self.is_ours


def temporary_name(of: Literal["segment", "ledger"]) -> str:
    """A name for a file that is not finished; `reap` removes it when its maker is dead.

    Its maker holds `MAKER_BYTE` of it. A `reap` that comes between the making of the file and the
    taking of the lock removes it, and the maker has to begin again.
    """
    return f"{_TEMPORARY_PREFIX}{of}_{os.urandom(6).hex()}"


def tier_status_name(uuid: bytes) -> str:
    """The tier status file of the segment that has this uuid (`kvelastic.tier_status`).

    Its maker holds `MAKER_BYTE` of it for as long as it lives; `reap` removes it after that.
    """
    return f".kvelastic_tiers_{uuid.hex()}"


def link_status_name(start: bytes) -> str:
    """The same of the node that was given these 16 random bytes (`kvelastic.link_status`)."""
    return f".kvelastic_links_{start.hex()}"


def open_file(name: str, flags: int) -> int:
    """Open a regular file of /dev/shm; other kinds (a pipe would block) are not segments."""
    if "/" in name or "\0" in name or name in {"", ".", ".."}:
        raise SegmentNotFoundError(f"no segment is called {name!r}")
    path = SHM_DIR / name
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise SegmentNotFoundError(f"no segment is called {name!r}", str(path)) from None
    except OSError as error:
        raise SegmentError(f"cannot open {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SegmentFormatError(f"{path} is not a segment")
    return fd


def version_of(fd: int) -> int | None:
    """The version of the segment in an open file; None if it is no segment."""
    version: int | None = _vmm.record_version(os.pread(fd, 16, 0))
    return version


def list_segments() -> list[SegmentInfo]:
    """Every segment that this user may read, by name; also dead and unreadable ones.

    Raises `SegmentError` where this process is out of file descriptors: none would look as if
    there were none.
    """
    found = (_inspect_if_segment(name) for name in _file_names())
    return sorted((info for info in found if info is not None), key=lambda info: info.name)


def _inspect_if_segment(name: str) -> SegmentInfo | None:
    try:
        return inspect(name)
    except SegmentError as error:
        if is_out_of_descriptors(error):
            raise
        return None


def _file_names() -> list[str]:
    try:
        with os.scandir(SHM_DIR) as entries:
            return [
                entry.name
                for entry in entries
                if entry.is_file(follow_symlinks=False) and not entry.name.startswith(_NO_SEGMENTS)
            ]
    except OSError as error:
        if is_out_of_descriptors(error):
            raise SegmentError(f"cannot list {SHM_DIR}: {error.strerror}") from error
        return []


def inspect(name: str) -> SegmentInfo:
    """Read one segment without mapping its file: who may write to that may also shorten it.

    Raises `SegmentNotFoundError`; `SegmentFormatError` if the file is not a segment at all. One of
    another version, or damaged, comes back as `unreadable`.
    """
    fd = open_file(name, READ_FLAGS)
    try:
        return _inspect(fd, name)
    finally:
        os.close(fd)


def _inspect(fd: int, name: str) -> SegmentInfo:
    if version_of(fd) is None:
        raise SegmentFormatError(f"{SHM_DIR / name} is not a segment")
    state = os.fstat(fd)
    is_ours = state.st_uid == os.geteuid()
    with _copy(fd, name, state.st_size) as memory:
        try:
            record = _vmm.Record.open(memory)
        except SegmentFormatError as error:
            return SegmentInfo(name, "unreadable", problem=str(error), is_ours=is_ours)
        try:
            header = record.read_header()
            life = liveness(fd, SCHEDULER_BYTE, owner_of(header))
            is_closing = life is Liveness.ALIVE and header["state"] == "closing"
            return SegmentInfo(
                name,
                "closing" if is_closing else life.value,
                is_ours=is_ours,
                header=header,
                usage=record.read_usage(),
                answer=record.read_answer(),
                request=record.read_request(),
                counters=record.counters(),
                engine_asleep=record.engine_asleep,
            )
        finally:
            record.release()


def _copy(fd: int, name: str, size_bytes: int) -> mmap.mmap:
    """Memory of our own that starts with what the record says now. Raises `SegmentError`."""
    memory = mmap.mmap(-1, max(1, min(size_bytes, _COPY_BYTES)))
    try:
        _vmm.copy_record(fd, memory)
    except OSError as error:
        memory.close()
        raise SegmentError(f"cannot read {SHM_DIR / name}: {error.strerror}") from error
    return memory


def owner_of(header: dict[str, Any]) -> ProcessIdentity:
    """Who made the segment that has this header."""
    return ProcessIdentity(
        pid=header["pid"],
        start_time_ticks=header["start_time_ticks"],
        boot_id=header["boot_id"],
        pid_namespace=header["pid_namespace"],
        uid=header["uid"],
    )


def reap() -> list[str]:
    """Remove the segments of this user's dead processes, and what they began to make.

    Returns the names removed, but for status files, which no command takes. Never raises and
    never waits: what is locked is left for the next.
    """
    removed: list[str] = []
    names: list[str] = []
    with suppress(SegmentError):
        names = _file_names()
    for name in names:
        with suppress(SegmentError):
            if inspect(name).is_reapable and remove_if_reapable(name, lock_s=0.0):
                removed.append(name)
    _reap_unheld(_TIER_STATUS)
    _reap_unheld(LINK_STATUS)
    return sorted(removed) + _reap_unheld(_TEMPORARY)


def _reap_unheld(kind: re.Pattern[str]) -> list[str]:
    """Remove files of that kind whose maker is dead."""
    removed = []
    with suppress(OSError), os.scandir(SHM_DIR) as entries:
        for entry in entries:
            if not kind.fullmatch(entry.name):
                continue
            with suppress(OSError, SegmentError):
                fd = open_file(entry.name, READ_FLAGS)
                try:
                    is_ours = os.fstat(fd).st_uid == os.geteuid()
                    if is_ours and liveness(fd, MAKER_BYTE) is Liveness.DEAD:
                        Path(entry.path).unlink()
                        removed.append(entry.name)
                finally:
                    os.close(fd)
    return removed


def delete(name: str, *, force: bool = False) -> None:
    """Remove the name; a live instance goes on without it, deaf to requests.

    Raises `SegmentBusyError` for a live or unreadable segment without `force`,
    `SegmentFormatError` for a file that is not a segment, `SegmentNotFoundError`, `SegmentError`.
    """
    obstacle = _remove(name, lambda info: force or info.status == "dead")
    if obstacle is None:
        return
    if obstacle.status == "unreadable":
        raise SegmentBusyError(
            f"the segment {name!r} cannot be read, so its instance may be alive: {obstacle.problem}"
        )
    raise SegmentBusyError(
        f"the segment {name!r} belongs to a live instance (process {obstacle.header['pid']})"
    )


def remove_if_reapable(name: str, lock_s: float = LOCK_WAIT_S) -> bool:
    """Remove a segment of this user's own dead process; False if it is anything else.

    Raises as `delete`.
    """
    return _remove(name, lambda info: info.is_reapable, lock_s) is None


def _remove(
    name: str, may_remove: Callable[[SegmentInfo], bool], lock_s: float = LOCK_WAIT_S
) -> SegmentInfo | None:
    """Unlink the segment that has the name; return it instead if it may not be.

    All is looked at under the lock on the file that is then unlinked, and the name is checked to
    lead to that file: the segment of a new starter of that name is never hit.
    """
    fd = open_file(name, READ_FLAGS)
    path = SHM_DIR / name
    try:
        with locked(fd, name, lock_s):
            info = _inspect(fd, name)
            # After that look: a live owner may leave without the lock, and another take the name.
            # A dead one does nothing any more, and who else removes its file waits for the lock.
            if inode_of(path.stat(follow_symlinks=False)) != inode_of(os.fstat(fd)):
                return None  # somebody else has removed it, as asked
            if not may_remove(info):
                return info
            path.unlink()
            return None
    except SegmentError:
        raise
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SegmentError(f"cannot remove {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def inode_of(state: os.stat_result) -> tuple[int, int]:
    """What tells a file from every other one as long as it is open or mapped."""
    return (state.st_dev, state.st_ino)


@contextmanager
def locked(fd: int, name: str, timeout_s: float, *, fail: bool = True) -> Iterator[None]:
    """Hold the lock on a segment's file.

    Raises `SegmentBusyError` after `timeout_s`, or goes on without the lock if not `fail`.
    """
    deadline = time.monotonic() + timeout_s
    held = True
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.002)  # flock has no deadline of its own
                continue
            if fail:
                raise SegmentBusyError(
                    f"another process has held the lock of {name!r} for {timeout_s:g} s"
                    " (a kvctl that was stopped?)"
                ) from None
            held = False
            break
    try:
        yield
    finally:
        if held:
            fcntl.flock(fd, fcntl.LOCK_UN)
