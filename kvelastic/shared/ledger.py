"""Ledgers: one control block in shared memory for all instances of a device.

    with join(device, own_segment.name, ...) as member: ...   # an instance; for its native pool
    for ledger in list_ledgers(): print(ledger.device, ledger.free_bytes)
    set_capacity("host", group="default", capacity_bytes=8 << 30)      # while instances run
    reap()                                       # every kvctl does this when it starts

A ledger is a file in /dev/shm, named by group and device. The first member creates it and the last
member removes it. Native code joins, leaves and grants without locks (vmm_csrc/ledger/ledger.h).
Only removal locks the file, and first checks that the name still refers to that file. If another
process holds the lock, the file stays until `reap` removes it.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from kvelastic import _vmm
from kvelastic.closing import Closing
from kvelastic.errors import (
    LedgerError,
    LedgerForeignError,
    PoolExhaustedError,
    SegmentBusyError,
    SegmentError,
    SegmentFormatError,
    is_out_of_descriptors,
)
from kvelastic.shared.ledger_facts import LedgerInfo, Member
from kvelastic.shared.liveness import MAKER_BYTE, Liveness, ProcessIdentity, boot_id, hold, liveness
from kvelastic.shared.segment_listing import (
    READ_FLAGS,
    SHM_DIR,
    WRITE_FLAGS,
    file_names,
    inode_of,
    locked,
    unfinished_file,
)
from kvelastic.units import format_size

__all__ = [
    "JoinedLedger", "LedgerInfo", "Member", "decide_page_bytes", "hold_as_worker", "join",
    "ledger_path", "list_ledgers", "reap", "set_capacity",
]  # fmt: skip

_log = logging.getLogger("kvelastic")

_PREFIX: Final = ".kvelastic_ledger_"
_LOCK_S: Final = 2.0
"""Seconds that a process waits for the file's lock."""
_JOIN_TRIES: Final = 100
_reaped_at_exit: set[Path] = set()


def ledger_path(group: str, device: str) -> Path:
    """Return the path of a device's ledger.

    The file name starts with a dot, so the file does not count as an instance.
    """
    return SHM_DIR / f"{_PREFIX}{group}_{re.sub(r'[^A-Za-z0-9-]', '-', device)}"


class JoinedLedger(Closing):
    """This process's membership of a ledger. Close it, or use it as a context manager.

    `member` is the argument for a native pool. Closing releases everything granted; do not use the
    pool afterwards. At exit, a process that holds no granted memory leaves the ledger. If it still
    holds memory, other processes free its grant once the kernel reports it dead.
    """

    def __init__(self, path: Path, fd: int, memory: mmap.mmap, member: _vmm.LedgerMember) -> None:
        self.path = path
        self.member = member
        self._fd = fd
        self._memory = memory
        self._pid = os.getpid()
        self._closed = False
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        if self._pid == os.getpid() and self.member.granted_bytes == 0:
            self.close()

    def close(self) -> None:
        """Leave the ledger; the last member removes the file.

        Idempotent. Does nothing in a forked child. Never blocks.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self.member.leave()
        _remove_if_empty(self.path, self._fd, self._memory)
        with suppress(BufferError):
            self._memory.close()  # an open pool keeps it mapped
        os.close(self._fd)

    def linger(self) -> None:
        """Keep the membership and its grant, for memory that outlives this object.

        Idempotent. The membership ends when the native member leaves, or when all processes of the
        member have ended.
        """
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            atexit.unregister(self._close_at_exit)
            os.close(self._fd)


def join(
    device: str,
    *,
    group: str,
    capacity_bytes: int,
    name: str,
    uuid: bytes,
    min_bytes: int = 0,
    priority: int = 0,
    total_bytes: int = 0,
    reserve_bytes: int = 0,
) -> JoinedLedger:
    """Join the ledger of `device`; create the ledger if it does not exist.

    The first member sets the ledger's `capacity_bytes` and `total_bytes`. `total_bytes` is all of
    the device's memory; 0 means the same as the capacity. If a later member passes another
    capacity, a warning is logged. `name` and `uuid` are those of the segment.

    `reserve_bytes` is the member's memory on the device besides KV cache. The other members are
    asked to release memory for it; this blocks for at most five seconds.

    Raises `GuaranteeError` if guarantees and reserves exceed the device's memory, `ReserveError` if
    the other members did not release enough for the reserve, `LedgerForeignError` if another user's
    instances share the device, and `LedgerError` if the file has another version or cannot be
    created.
    """
    path = ledger_path(group, device)
    me = ProcessIdentity.of_this_process()
    for _ in range(_JOIN_TRIES):
        fd = _open_or_make(path, device, group, capacity_bytes, total_bytes)
        memory: mmap.mmap | None = None
        try:
            memory = _map(fd, path)
            _vmm.ledger_reap(memory, fd)
            with _alone(fd, path):
                member = _vmm.LedgerMember.join(
                    memory,
                    name=name,
                    uuid=uuid,
                    pid=me.pid,
                    start_time_ticks=me.start_time_ticks,
                    pid_namespace=me.pid_namespace,
                    uid=me.uid,
                    min_bytes=min_bytes,
                    reserve_bytes=reserve_bytes,
                    priority=priority,
                    path=str(path),
                    fd=fd,
                    # A forked child inherits mappings of host memory, but not of device memory.
                    children_keep=device == "host",
                )
            if member is None:  # the last member has just left
                _remove_shut(fd, path)
        except BaseException as error:
            gone = not _leads_to(path, fd)
            if memory is not None:
                _remove_if_empty(path, fd, memory)  # this call may have created it
            os.close(fd)
            if isinstance(error, PoolExhaustedError):
                raise LedgerError(
                    f"{path}: {error}; end an instance of the device first, or set KVELASTIC_LEDGER"
                    " to another name and divide the memory between the two with"
                    " KVELASTIC_HOST_MEMORY or KVELASTIC_GPU_UTILIZATION"
                ) from error
            if isinstance(error, SegmentError) and gone:
                continue
            raise
        if member is None:
            os.close(fd)
            continue
        if member.capacity_bytes != capacity_bytes:
            _log.warning(
                "The device %s is shared with instances that count its capacity as %s, not %s;"
                " their figure applies until all of them have ended. To change it, run"
                " `kvctl capacity`; to share no memory with them, start this instance with another"
                " KVELASTIC_LEDGER.",
                device,
                format_size(member.capacity_bytes),
                format_size(capacity_bytes),
            )
        return JoinedLedger(path, fd, memory, member)
    raise LedgerError(f"{path} is removed as fast as it is made")


def decide_page_bytes(
    device: str, *, group: str, capacity_bytes: int, total_bytes: int, page_bytes: int
) -> int:
    """Return the default page size of `device`: `page_bytes`, unless an earlier caller set another.

    Creates the ledger if it does not exist, so that instances that start at the same time agree.
    The value stays for the ledger's lifetime. A ledger without members is removed when this process
    exits, or by `reap`. Raises `LedgerError` if the ledger cannot be used.
    """
    path = ledger_path(group, device)
    if path not in _reaped_at_exit:
        _reaped_at_exit.add(path)
        atexit.register(_reap_quietly, path)
    for _ in range(_JOIN_TRIES):
        fd = _open_or_make(path, device, group, capacity_bytes, total_bytes)
        try:
            with _map(fd, path) as memory:
                decided_bytes = _vmm.ledger_decide_page_bytes(memory, page_bytes)
            if _leads_to(path, fd):
                return decided_bytes
        finally:
            os.close(fd)
    raise LedgerError(f"{path} is removed as fast as it is made")


def hold_as_worker(uuid: bytes, rank: int, device: str | None = None) -> list[_vmm.LivenessLock]:
    """Mark this process as a live worker that may hold memory of the instance with segment `uuid`.

    While this process lives, the instance keeps what the ledger of `device` granted, even after its
    scheduler has died. `device` is the ledger's name for the device of this rank's pages; grants of
    other devices do not depend on this process. With None, the mark applies in every ledger that
    the instance has joined; use it if all ranks share a device.

    Call it before any page is mapped. Raises `LedgerError` if the instance is in no such ledger,
    and `SegmentBusyError` if another process already has this rank.
    """
    held = []
    found = False
    for path in _paths():
        # Ledgers of other users are ignored.
        with suppress(FileNotFoundError, LedgerError), _opened(path, READ_FLAGS) as (fd, memory):
            raw = _vmm.read_ledger(memory)
            for entry in raw["members"]:
                if entry["uuid"] != uuid or device not in {None, raw["device"]}:
                    continue
                found = True
                byte = _vmm.ledger_liveness_byte(entry["slot"], entry["incarnation"], 1 + rank)
                lock = hold(path, fd, byte)
                if lock is not None:
                    held.append(lock)
    if not found:
        raise LedgerError(
            f"the instance of this worker (rank {rank}) is in no ledger of"
            f" {SHM_DIR if device is None else device}: its scheduler has ended, or has another"
            " /dev/shm, or has placed this rank on another device; restart the engine"
        )
    return held


def set_capacity(device: str, *, group: str, capacity_bytes: int) -> int:
    """Set how much the members of a ledger may hold together; return the previous capacity.

    Applies immediately. If the members hold more than the new capacity, they release the excess
    over time. The value stays for the ledger's lifetime; after the last member has left, the next
    member to join sets it again.

    Any process of the ledger's user may call this. Blocks for at most two seconds on the file's
    lock. If it raises, nothing has changed: `GuaranteeError` if the capacity is below the
    guarantees and reserves, `InvalidArgumentError` if it is below 64 KiB, `LedgerForeignError` if
    the ledger belongs to another user, and `LedgerError` if it does not exist or cannot be used.
    """
    path = ledger_path(group, device)
    try:
        with _opened(path, WRITE_FLAGS) as (fd, memory):
            with _locked_file(fd, path):
                before_bytes = _vmm.ledger_set_capacity(memory, capacity_bytes, fd)
            # A member that left while this held the lock could not remove the file.
            if _remove_if_empty(path, fd, memory) or not _leads_to(path, fd):
                raise LedgerError(f"the last instance on {device} has just ended")
            return before_bytes
    except FileNotFoundError as error:
        raise LedgerError(f"no instance is on {device}: there is no {path}") from error


def list_ledgers() -> list[LedgerInfo]:
    """Return every ledger of this machine, sorted by device, including those this user cannot read.

    Raises `LedgerError` if this process is out of file descriptors.
    """
    found = []
    for path in _paths():
        with suppress(FileNotFoundError):
            found.append(_look(path))
    return sorted(found, key=lambda info: (info.device, info.group))


def reap() -> list[Path]:
    """Free the grants of dead members and remove ledgers without members; return their paths."""
    paths: list[Path] = []
    with suppress(LedgerError):
        paths = _paths()
    return [path for path in paths if _reap_quietly(path)]


def _reap_quietly(path: Path) -> bool:
    """Free grants of dead members and remove the file if empty; return True if removed."""
    with (
        suppress(OSError, LedgerError, SegmentBusyError, SegmentFormatError),
        _opened(path, WRITE_FLAGS) as (fd, memory),
    ):
        return _remove_if_empty(path, fd, memory)
    return False


def _paths() -> list[Path]:
    try:
        return [SHM_DIR / name for name in file_names() if name.startswith(_PREFIX)]
    except SegmentError as error:
        raise LedgerError(str(error)) from error


def _open_or_make(
    path: Path, device: str, group: str, capacity_bytes: int, total_bytes: int
) -> int:
    """Return a file descriptor of the ledger. A new file is complete before it gets its name."""
    for _ in range(_JOIN_TRIES):
        try:
            return _open(path, WRITE_FLAGS)
        except FileNotFoundError:
            pass
        try:
            return _make(path, device, group, capacity_bytes, total_bytes)
        except FileExistsError:
            pass  # another starter was faster
        except FileNotFoundError:
            pass  # another process reaped the unfinished file before it was locked
        except SegmentError as error:
            raise LedgerError(str(error)) from error
        except OSError as error:
            raise LedgerError(f"cannot make a ledger in {SHM_DIR}: {error}") from error
    raise LedgerError(f"{path} comes and goes")


def _make(path: Path, device: str, group: str, capacity_bytes: int, total_bytes: int) -> int:
    with unfinished_file("ledger", _vmm.LEDGER_BYTES) as (temporary, fd, lock):
        with mmap.mmap(fd, _vmm.LEDGER_BYTES) as memory:
            _vmm.ledger_create(
                memory,
                device=device,
                group=group,
                capacity_bytes=capacity_bytes,
                total_bytes=total_bytes,
                uid=os.geteuid(),
                boot_id=boot_id(),
                created_realtime_ns=time.time_ns(),
            )
        os.link(temporary, path, follow_symlinks=False)
    if lock is not None:
        lock.release()
    return fd


def _open(path: Path, flags: int) -> int:
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise LedgerForeignError(
            f"the device's ledger {path} belongs to {_owner(path)}, whose instances share the"
            " device; run as that user, or set KVELASTIC_LEDGER to a name of your own and divide"
            " the memory with KVELASTIC_HOST_MEMORY or KVELASTIC_GPU_UTILIZATION"
        ) from error
    except OSError as error:
        raise LedgerError(f"cannot open {path}: {error.strerror}") from error
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        os.close(fd)
        raise LedgerForeignError(f"{path} belongs to {_owner(path)}; it is not used")
    return fd


def _owner(path: Path) -> str:
    try:
        return f"user {path.stat(follow_symlinks=False).st_uid}"
    except OSError:
        return "another user"


@contextmanager
def _locked_file(fd: int, path: Path) -> Iterator[None]:
    try:
        with locked(fd, path.name, _LOCK_S):
            yield
    except SegmentBusyError as error:
        raise LedgerError(str(error)) from error


@contextmanager
def _alone(fd: int, path: Path) -> Iterator[None]:
    """Exclude other joiners where liveness locks, which already do so, are not available."""
    if liveness(fd, MAKER_BYTE) is not Liveness.UNKNOWN:
        yield
        return
    with _locked_file(fd, path):
        yield


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return inode_of(path.stat(follow_symlinks=False)) == inode_of(os.fstat(fd))
    except FileNotFoundError:
        return False


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[tuple[int, mmap.mmap]]:
    """Open and map a ledger. Raises FileNotFoundError, `LedgerError`."""
    fd = _open(path, flags)
    try:
        with _map(fd, path, flags) as memory:
            yield fd, memory
    finally:
        os.close(fd)


def _map(fd: int, path: Path, flags: int = WRITE_FLAGS) -> mmap.mmap:
    try:
        writing = mmap.PROT_WRITE if flags == WRITE_FLAGS else 0
        memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ | writing)
        _vmm.read_ledger(memory)
    except (OSError, ValueError, SegmentFormatError) as error:
        raise LedgerError(
            f"{path} is {error}; end the instances that use it and remove it, or set"
            " KVELASTIC_LEDGER to another name"
        ) from error
    return memory


def _look(path: Path) -> LedgerInfo:
    device = path.name[len(_PREFIX) :]
    try:
        fd = _open(path, READ_FLAGS)
    except LedgerForeignError as error:
        return LedgerInfo(device, "foreign", problem=str(error))
    except LedgerError as error:
        if is_out_of_descriptors(error):
            raise
        return LedgerInfo(device, "unreadable", problem=str(error))
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            raw = _vmm.read_ledger(memory, fd)
    except (OSError, ValueError, SegmentFormatError) as error:
        if is_out_of_descriptors(error):
            raise LedgerError(f"cannot map {path}: {error}") from error
        return LedgerInfo(device, "unreadable", problem=str(error))
    finally:
        os.close(fd)
    return LedgerInfo(
        device=raw["device"],
        status="readable",
        group=raw["group"],
        capacity_bytes=raw["capacity_bytes"],
        total_bytes=raw["total_bytes"],
        others_bytes=raw["others_bytes"],
        members=tuple(_member(entry) for entry in raw["members"]),
    )


_MEMBER_FIELDS: Final = tuple(field.name for field in fields(Member))


def _member(entry: dict[str, Any]) -> Member:
    return Member(**{name: entry[name] for name in _MEMBER_FIELDS})


def _remove_if_empty(path: Path, fd: int, memory: mmap.mmap) -> bool:
    """Free the grants of dead members; remove the file unless it has members or is locked.

    Returns True if the file was removed. Never blocks. A member that leaves while another process
    holds the lock cannot remove the file. So the process that held the lock checks once more.
    """
    while True:
        _vmm.ledger_reap(memory, fd)
        if not _is_empty(memory) or not _leads_to(path, fd):
            return False
        try:
            with locked(fd, path.name, 0.0):
                if _vmm.ledger_shut(memory) and _leads_to(path, fd):
                    path.unlink()
                    return True
        except (SegmentBusyError, OSError):
            return False


def _is_empty(memory: mmap.mmap) -> bool:
    return not _vmm.read_ledger(memory)["members"]


def _remove_shut(fd: int, path: Path) -> None:
    """Remove a file that was shut; the process that shut it may have died before removing it."""
    with _locked_file(fd, path):
        if _leads_to(path, fd):
            path.unlink(missing_ok=True)
