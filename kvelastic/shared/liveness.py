"""Liveness of processes: a lock on a byte of a shared file, which the kernel frees at exit.

    lock = hold(path, fd, SCHEDULER_BYTE)                       # in the process itself
    liveness(fd, SCHEDULER_BYTE, owner=ProcessIdentity(...))    # in another: Liveness.ALIVE

The check is native code (vmm_csrc/base/liveness_lock.h). The bytes of a segment's file:

    0         the scheduler: the instance handles requests while it is held
    1 + rank  the worker of that rank

vmm_csrc/ledger/ledger.h lists the bytes of a ledger. In a file that still has a temporary name, the
creator holds byte 0. Pid, start time, boot id and pid namespace identify a process for people. The
check also compares them before it reports a process as dead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Final

from kvelastic import _vmm

SCHEDULER_BYTE: Final = 0
MAKER_BYTE: Final = 0
FIRST_WORKER_BYTE: Final = 1


class Liveness(Enum):
    """Liveness of another process, as seen by this one."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"
    """Cannot be checked here (the file is not on a tmpfs). Leave the process's memory and files
    alone."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of one process, unique even if its pid is reused."""

    pid: int
    start_time_ticks: int
    boot_id: bytes
    pid_namespace: int
    uid: int

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Return the calling process's identity. Never blocks. A forked child gets its own."""
        pid = os.getpid()
        return cls(
            pid=pid,
            start_time_ticks=start_time_ticks(pid) or 0,
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            uid=os.geteuid(),
        )

    def liveness(self) -> Liveness:
        """Check the process by its pid and start time; reads one file of /proc.

        Use it for a process without segment or ledger, such as a launched engine. Returns UNKNOWN
        if the process is in another pid namespace or hidden by /proc.
        """
        boot, namespace = boot_id(), pid_namespace()
        if any(boot) and any(self.boot_id) and self.boot_id != boot:
            return Liveness.DEAD
        if namespace == 0 or self.pid_namespace != namespace:
            return Liveness.UNKNOWN
        ticks = start_time_ticks(self.pid)
        if ticks is not None:
            return Liveness.ALIVE if ticks == self.start_time_ticks else Liveness.DEAD
        return Liveness.DEAD if _is_gone(self.pid) else Liveness.UNKNOWN


def hold(path: Path, fd: int, byte: int) -> _vmm.LivenessLock | None:
    """Lock a byte of the file until `release()` or the end of this process.

    Forked children do not hold the lock. `fd` is any descriptor of the file, and `path` must refer
    to that file. Returns None if the file system does not support such locks. Raises
    `SegmentBusyError` if a live process holds the byte, or `SegmentError`.
    """
    return _vmm.LivenessLock.hold(str(path), fd, byte)


def liveness(fd: int, byte: int, owner: ProcessIdentity | None = None) -> Liveness:
    """Return whether the holder of the byte lives; one system call in the usual case.

    `fd` is the caller's own open descriptor. `owner` is reported as dead only if it is also not
    found among the visible processes.
    """
    if owner is None:
        return Liveness(_vmm.liveness_of(fd, byte))
    return Liveness(
        _vmm.liveness_of(
            fd,
            byte,
            pid_namespace=owner.pid_namespace,
            processes=[(owner.pid, owner.start_time_ticks)],
        )
    )


def stat_fields(pid: int, proc: Path = Path("/proc")) -> list[bytes]:
    """Return the fields after the name in a process's stat file. Raises OSError."""
    # The name may contain spaces and brackets. So split after its last closing bracket.
    return (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def start_time_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if it does not exist.

    A zombie whose threads have all ended counts as gone: its memory is released.
    """
    try:
        fields = stat_fields(pid)
        state, threads, ticks = fields[0], int(fields[17]), int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
    # The leader of a thread group can be a zombie while its other threads run.
    if state in (b"Z", b"X", b"x") and threads <= 1:
        return None
    return ticks


def _is_gone(pid: int) -> bool:
    """Return whether the pid has no process or only a zombie; False if that is not visible."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    # The process exists and belongs to this user, but start_time_ticks() found no running one: it
    # is a zombie, or /proc could not be opened.
    try:
        return b"Z" in stat_fields(pid)[:1]
    except OSError:
        return False


@lru_cache(maxsize=1)
def boot_id() -> bytes:
    """Return the 16 bytes of this machine's boot id; zeros if the kernel does not provide it."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return bytes.fromhex(text.strip().replace("-", "")).ljust(16, b"\0")[:16]
    except (OSError, ValueError):
        return bytes(16)


def pid_namespace() -> int:
    """Return the inode of this process's pid namespace; 0 if /proc does not provide it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116  (a link: Path adds nothing)
    except OSError:
        return 0
