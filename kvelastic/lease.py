"""Whether a process lives: a lock on a byte of a shared file, which the kernel frees at its end.

    life = hold(path, fd, SCHEDULER_BYTE)                       # the process itself, and its judge:
    liveness(fd, SCHEDULER_BYTE, owner=ProcessIdentity(...))    # Liveness.ALIVE

The judge is native (vmm_csrc/base/life_lock.h), one for all. The bytes of a segment's file:

    0         the scheduler: the instance answers as long as it is held
    1 + rank  the worker of that rank

vmm_csrc/ledger/ledger.h lists those of a ledger. In a file that has only a temporary name yet,
byte 0 is its maker's. Pid, start time, boot id and pid namespace name a process for people; a judge
checks them too before it calls a process dead.
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
    """What this process can say of another one."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"
    """It cannot be asked here (the file is on no tmpfs): nothing may be done to what it has."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, told from every other one that had or will have its pid."""

    pid: int
    start_time_ticks: int
    boot_id: bytes
    pid_namespace: int
    uid: int

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Identify the calling process. Never blocks; a fork's child gets its own."""
        pid = os.getpid()
        return cls(
            pid=pid,
            start_time_ticks=start_time_ticks(pid) or 0,
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            uid=os.geteuid(),
        )

    def liveness(self) -> Liveness:
        """Look for a process that holds no lock, by its number; reads one file of /proc.

        For what has neither segment nor ledger (an engine that was launched, say). It is unknown
        where it cannot be looked at: in another pid namespace, or hidden by /proc.
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


def hold(path: Path, fd: int, byte: int) -> _vmm.LifeLock | None:
    """Hold a byte of the file until `release()` or the end of this process.

    Forked children do not keep it. `fd` is any open of the file that `path` must lead to. None: its
    file system has no such locks, and judges know that too. Raises `SegmentBusyError` if a live
    process holds it, `SegmentError`.
    """
    return _vmm.LifeLock.hold(str(path), fd, byte)


def liveness(fd: int, byte: int, owner: ProcessIdentity | None = None) -> Liveness:
    """Ask whether the byte is held. `fd` is an open of the caller's own; one system call.

    Before `owner` is called dead, it is looked for among the processes that this one can see.
    """
    if owner is None:
        return Liveness(_vmm.life_of(fd, byte))
    return Liveness(
        _vmm.life_of(
            fd,
            byte,
            pid_namespace=owner.pid_namespace,
            processes=[(owner.pid, owner.start_time_ticks)],
        )
    )


def start_time_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process.

    A zombie whose threads have all ended is no process any more: its memory is gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the name and may hold blanks and brackets: count after its last bracket.
    fields = stat[stat.rfind(b")") + 1 :].split()
    try:
        state, threads, ticks = fields[0], int(fields[17]), int(fields[19])
    except (IndexError, ValueError):
        return None
    # A thread group's leader can be a zombie while other threads of it go on.
    if state in (b"Z", b"X", b"x") and threads <= 1:
        return None
    return ticks


def _is_gone(pid: int) -> bool:
    """Whether no process has the number, or a zombie; False where that cannot be seen."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    # Ours, and not to be read as one that runs: a zombie, or /proc could not be opened.
    try:
        return b"Z" in Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
    except OSError:
        return False


@lru_cache(maxsize=1)
def boot_id() -> bytes:
    """The 16 bytes that name this boot of the machine; zeros where the kernel does not say."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return bytes.fromhex(text.strip().replace("-", "")).ljust(16, b"\0")[:16]
    except (OSError, ValueError):
        return bytes(16)


def pid_namespace() -> int:
    """The inode of this process's pid namespace; 0 where /proc does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116  (a link: Path adds nothing)
    except OSError:
        return 0
