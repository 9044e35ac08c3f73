"""The directory of segments, /dev/shm: lists and inspects segments and removes dead ones.

    for info in list_segments(): print(info.name, info.status)
    reap()                       # every kvctl and every instance does this when it starts

A process that removes another process's segment holds a lock on the *file* while it inspects and
unlinks it. So it cannot remove a new segment of the same name. The lock is flock(), which the
kernel releases when its holder dies. An instance takes the lock when it ends and for limits of
kvcached's clients, and never waits for it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from kvelastic import _vmm
from kvelastic.errors import (
    SegmentBusyError,
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
    is_out_of_descriptors,
)
from kvelastic.file_lock import lock_within
from kvelastic.shared.liveness import (
    MAKER_BYTE,
    SCHEDULER_BYTE,
    Liveness,
    ProcessIdentity,
    hold,
    liveness,
)

SHM_DIR: Final = Path("/dev/shm")
LOCK_WAIT_S: Final = 1.0
"""Seconds to wait for a segment's lock, which is normally held for microseconds."""

READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAKE_TRIES: Final = 100

_TEMPORARY_PREFIX: Final = ".kvelastic_new_"
_UNHELD: Final = re.compile(
    r"\.kvelastic_(new_(segment|ledger|status)_[0-9a-f]{12}|(tiers|links)_[0-9a-f]{32})"
)
LINK_STATUS: Final = re.compile(r"\.kvelastic_links_[0-9a-f]{32}")
_NO_SEGMENTS: Final = (_TEMPORARY_PREFIX, ".kvelastic_tiers_", ".kvelastic_links_")
_COPY_BYTES: Final = 4 * _vmm.SEGMENT_BYTES

KVCACHED_BYTES: Final = 24
"""Size of kvcached's segment (`kvcached_segment`), by which its programs recognize it."""
_BESIDE_KVCACHED: Final = ".kvelastic"
_MOST_NAME_BYTES: Final = 64


@dataclass(frozen=True)
class SegmentInfo:
    """One inspected segment. The dicts are those of `_vmm.ControlBlock`, empty if unreadable."""

    name: str
    """Name of the file in /dev/shm; commands use this name."""
    status: str
    """alive, closing, dead, unknown (liveness cannot be checked) or unreadable (see `problem`)."""
    problem: str = ""
    is_ours: bool = True
    """Whether the file belongs to this user."""
    header: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    ack: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    engine_asleep: bool | None = None
    """Whether the engine itself sleeps; None if not reported."""

    @property
    def is_alive(self) -> bool:
        """Whether its instance may still handle requests."""
        return self.status in {"alive", "closing", "unknown"}

    @property
    def is_reapable(self) -> bool:
        """Whether `reap` may remove it: dead, and owned by this user."""
        return self.status == "dead" and self.is_ours


FileOf: TypeAlias = Literal["segment", "ledger", "status"]


def temporary_name(of: FileOf) -> str:
    """Return a name for an unfinished file; `reap` removes the file once its creator is dead."""
    return f"{_TEMPORARY_PREFIX}{of}_{os.urandom(6).hex()}"


def tier_status_name(uuid: bytes) -> str:
    """Return the name of the tier status file of a segment (`kvelastic.shared.tier_status`).

    Its creator holds a lock on `MAKER_BYTE` of the file while it lives; afterwards `reap` removes
    the file.
    """
    return f".kvelastic_tiers_{uuid.hex()}"


def link_status_name(start: bytes) -> str:
    """Return the name of a node's link status file (`kvelastic.shared.link_status`).

    `start` is the node's 16 random bytes. Locked and reaped like a tier status file.
    """
    return f".kvelastic_links_{start.hex()}"


def own_name(kvcached_name: str) -> str:
    """Return the name of the segment of an instance whose kvcached segment has the given name."""
    return kvcached_name[: _MOST_NAME_BYTES - len(_BESIDE_KVCACHED)] + _BESIDE_KVCACHED


def kvcached_name(name: str) -> str:
    """Return the name by which programs for kvcached know the instance with this segment."""
    return name.removesuffix(_BESIDE_KVCACHED)


def found_name(name: str) -> str:
    """Return the name of the segment that a user calls `name`: by the kvcached name, or itself."""
    beside = own_name(name)
    if is_kvcached(name) and (SHM_DIR / beside).is_file():
        return beside
    return name


def is_kvcached(name: str) -> bool:
    """Return whether the name refers to a file of the size of kvcached's segment."""
    with suppress(OSError, ValueError):
        state = (SHM_DIR / name).stat(follow_symlinks=False)
        return stat.S_ISREG(state.st_mode) and state.st_size == KVCACHED_BYTES
    return False


def open_file(name: str, flags: int) -> int:
    """Open a regular file of /dev/shm; return its descriptor.

    Raises `SegmentNotFoundError`, `SegmentFormatError` for another kind of file (a pipe would
    block), or `SegmentError`.
    """
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


@contextmanager
def unfinished_file(
    of: FileOf, size_bytes: int
) -> Iterator[tuple[Path, int, _vmm.LivenessLock | None]]:
    """Create a file for the body to fill and to link to its real name.

    Yields its temporary path, which is removed after the body, and what `make_file` returns, which
    is released if the body raises. Raises `SegmentError` if the system refuses.
    """
    path = SHM_DIR / temporary_name(of)
    try:
        fd, lock = make_file(path, size_bytes)
    except OSError as error:
        raise SegmentError(f"cannot make a {of} file in {SHM_DIR}: {error}") from error
    try:
        yield path, fd, lock
    except BaseException:
        if lock is not None:
            lock.release()
        os.close(fd)
        raise
    finally:
        with suppress(OSError):
            path.unlink()


def make_file(path: Path, size_bytes: int) -> tuple[int, _vmm.LivenessLock | None]:
    """Create a file in `SHM_DIR` that only this user can access, and lock its `MAKER_BYTE`.

    Returns its descriptor and the lock (see `liveness.hold`). After an error there is no file.
    Raises `OSError` or `SegmentError` if the system refuses.
    """
    for _ in range(_MAKE_TRIES):
        made = _make_file(path, size_bytes)
        if made is not None:
            return made
    raise SegmentError(f"files that begin in {SHM_DIR} are removed as fast as they are made")


def _make_file(path: Path, size_bytes: int) -> tuple[int, _vmm.LivenessLock | None] | None:
    """Make the file; return None if `reap` removed it before it was locked."""
    import posix_ipc  # only instances make files; the command line does not

    try:
        fd: int = posix_ipc.SharedMemory(
            f"/{path.name}", posix_ipc.O_CREX, mode=0o600, size=size_bytes
        ).fd
    except posix_ipc.Error as error:
        raise SegmentError(str(error)) from error
    lock: _vmm.LivenessLock | None = None
    try:
        os.fchmod(fd, 0o600)  # regardless of the umask
        # Without this, a full /dev/shm would raise SIGBUS at the first access instead of an error
        # here.
        os.posix_fallocate(fd, 0, size_bytes)
        lock = hold(path, fd, MAKER_BYTE)
        path.stat()
    except BaseException as error:
        is_reaped = not path.exists()
        unlink_own(path, fd)
        if lock is not None:
            lock.release()
        os.close(fd)
        if is_reaped and isinstance(error, (OSError, SegmentError)):
            return None
        raise
    return fd, lock


def unlink_own(path: Path, fd: int) -> None:
    """Remove the name if it still refers to the open file, and not to a newer one."""
    with suppress(OSError):
        if inode_of(path.stat(follow_symlinks=False)) == inode_of(os.fstat(fd)):
            path.unlink()


def version_of(fd: int) -> int | None:
    """Return the version of the segment in an open file; None if it is not a segment."""
    version: int | None = _vmm.control_block_version(os.pread(fd, 16, 0))
    return version


def list_segments() -> list[SegmentInfo]:
    """Return every segment that this user may read, sorted by name, also dead and unreadable ones.

    Raises `SegmentError` if this process is out of file descriptors, because the list would wrongly
    be empty.
    """
    found = (_inspect_if_segment(name) for name in file_names() if _may_be_segment(name))
    return sorted((info for info in found if info is not None), key=lambda info: info.name)


def _inspect_if_segment(name: str) -> SegmentInfo | None:
    try:
        return _inspect_file(name)
    except SegmentError as error:
        if is_out_of_descriptors(error):
            raise
        return None


def _may_be_segment(name: str) -> bool:
    return not name.startswith(_NO_SEGMENTS)


def file_names() -> list[str]:
    """Return the names of the regular files in /dev/shm; none if it cannot be listed.

    Raises `SegmentError` if this process is out of file descriptors.
    """
    try:
        with os.scandir(SHM_DIR) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError as error:
        if is_out_of_descriptors(error):
            raise SegmentError(f"cannot list {SHM_DIR}: {error.strerror}") from error
        return []


def inspect(name: str) -> SegmentInfo:
    """Inspect one segment, without mapping its file: another process may truncate the file.

    The name of the instance's kvcached segment will do. Raises `SegmentNotFoundError`, or
    `SegmentFormatError` if the file is not a segment. A damaged segment, or one of another version,
    is returned as `unreadable`.
    """
    return _inspect_file(found_name(name))


def _inspect_file(name: str) -> SegmentInfo:
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
            control_block = _vmm.ControlBlock.open(memory)
        except SegmentFormatError as error:
            return SegmentInfo(name, "unreadable", problem=str(error), is_ours=is_ours)
        try:
            header = control_block.read_header()
            alive = liveness(fd, SCHEDULER_BYTE, owner_of(header))
            is_closing = alive is Liveness.ALIVE and header["state"] == "closing"
            return SegmentInfo(
                name,
                "closing" if is_closing else alive.value,
                is_ours=is_ours,
                header=header,
                usage=control_block.read_usage(),
                ack=control_block.read_ack(),
                request=control_block.read_request(),
                counters=control_block.counters(),
                engine_asleep=control_block.engine_asleep,
            )
        finally:
            control_block.release()


def _copy(fd: int, name: str, size_bytes: int) -> mmap.mmap:
    """Copy the control block into private memory. Raises `SegmentError`."""
    memory = mmap.mmap(-1, max(1, min(size_bytes, _COPY_BYTES)))
    try:
        _vmm.copy_control_block(fd, memory)
    except OSError as error:
        memory.close()
        raise SegmentError(f"cannot read {SHM_DIR / name}: {error.strerror}") from error
    return memory


def owner_of(header: dict[str, Any]) -> ProcessIdentity:
    """Return the process that created the segment with this header."""
    return ProcessIdentity(
        pid=header["pid"],
        start_time_ticks=header["start_time_ticks"],
        boot_id=header["boot_id"],
        pid_namespace=header["pid_namespace"],
        uid=header["uid"],
    )


def reap() -> list[str]:
    """Remove segments, status files and unfinished files of this user's dead processes.

    Returns the removed names, except those of status files, which commands do not use. Never raises
    and never blocks: a locked file is left for the next call.
    """
    removed: list[str] = []
    names: list[str] = []
    with suppress(SegmentError):
        names = file_names()
    for name in filter(_may_be_segment, names):
        with suppress(SegmentError):
            if _inspect_file(name).is_reapable and remove_if_reapable(name, lock_s=0.0):
                removed.append(name)
    unheld = [name for name in names if _UNHELD.fullmatch(name) and _remove_if_unheld(name)]
    return sorted(removed) + [name for name in unheld if name.startswith(_TEMPORARY_PREFIX)]


def _remove_if_unheld(name: str) -> bool:
    """Remove a file of this user whose creator is dead; return whether it was removed."""
    with suppress(OSError, SegmentError):
        fd = open_file(name, READ_FLAGS)
        try:
            is_ours = os.fstat(fd).st_uid == os.geteuid()
            if is_ours and liveness(fd, MAKER_BYTE) is Liveness.DEAD:
                (SHM_DIR / name).unlink()
                return True
        finally:
            os.close(fd)
    return False


def delete(name: str, *, force: bool = False) -> None:
    """Remove the segment. A live instance keeps running, but no longer receives requests.

    Raises `SegmentBusyError` for a live or unreadable segment without `force`, or if the lock is
    not available in time. Raises `SegmentFormatError` for a file that is not a segment,
    `SegmentNotFoundError` or `SegmentError`.
    """
    name = found_name(name)
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
    """Remove the segment of a dead process of this user; return False for any other segment.

    Raises the same errors as `delete`.
    """
    return _remove(name, lambda info: info.is_reapable, lock_s) is None


def _remove(
    name: str, may_remove: Callable[[SegmentInfo], bool], lock_s: float = LOCK_WAIT_S
) -> SegmentInfo | None:
    """Unlink a segment if `may_remove` allows it; else return its info.

    The segment is inspected under a lock on the file, and the name is checked to still refer to
    that file. So a new segment of the same name is never removed.
    """
    fd = open_file(name, READ_FLAGS)
    path = SHM_DIR / name
    try:
        with locked(fd, name, lock_s):
            info = _inspect(fd, name)
            # Check this after the inspection. A live owner may leave without the lock, and another
            # instance may take the name. A dead owner does nothing, and other processes that remove
            # its file wait for the lock.
            if inode_of(path.stat(follow_symlinks=False)) != inode_of(os.fstat(fd)):
                return None  # another process has already removed it
            if not may_remove(info):
                return info
            path.unlink()
            _remove_beside(name)
            return None
    except SegmentError:
        raise
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SegmentError(f"cannot remove {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def _remove_beside(name: str) -> None:
    """Remove the kvcached segment of a dead instance, unless a live one keeps it."""
    other = kvcached_name(name)
    if other != name and is_kvcached(other):
        _remove_if_unheld(other)


def inode_of(state: os.stat_result) -> tuple[int, int]:
    """Return a file's identity, unique while the file is open or mapped."""
    return (state.st_dev, state.st_ino)


@contextmanager
def locked(fd: int, name: str, timeout_s: float, *, fail: bool = True) -> Iterator[None]:
    """Hold the lock on a segment's file while the block runs.

    Blocks for at most `timeout_s` seconds. Then raises `SegmentBusyError`, or continues without the
    lock if `fail` is False.
    """
    is_held = lock_within(fd, timeout_s)
    if not is_held and fail:
        raise SegmentBusyError(
            f"another process has held the lock of {name!r} for {timeout_s:g} s"
            " (a kvctl that was stopped?)"
        )
    try:
        yield
    finally:
        if is_held:
            fcntl.flock(fd, fcntl.LOCK_UN)
