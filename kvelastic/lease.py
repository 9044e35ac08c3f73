"""Who owns a segment, and whether that process still lives.

    me = ProcessIdentity.of_this_process()
    me.liveness()        # Liveness.ALIVE

A process is named by pid, start time, boot id and pid namespace together: a pid alone is given to
another process sooner or later, and a segment must never be taken for alive (or removed) because
of a stranger who has its number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path


class Liveness(Enum):
    """What this process can say of another one."""

    ALIVE = "alive"
    DEAD = "dead"
    ELSEWHERE = "elsewhere"
    """It runs (or ran) in another pid namespace of this boot, where nobody here can look."""


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

    def is_of_this_namespace(self) -> bool:
        """Whether its pid means here what it meant to itself."""
        return self.pid_namespace == pid_namespace()

    def liveness(self) -> Liveness:
        """Look whether the process lives; reads one file of /proc."""
        if self.boot_id != boot_id():
            return Liveness.DEAD
        if not self.is_of_this_namespace():
            return Liveness.ELSEWHERE
        ticks = start_time_ticks(self.pid)
        if ticks is None and _is_hidden(self.pid):
            return Liveness.ALIVE
        return Liveness.ALIVE if ticks == self.start_time_ticks else Liveness.DEAD


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


def _is_hidden(pid: int) -> bool:
    """Whether the process is there although /proc does not show it (mounted with hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False  # ours, so /proc would show it: a zombie


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
