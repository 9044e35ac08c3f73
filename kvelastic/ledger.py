"""Ledgers: the record in shared memory that the instances of one device share.

    with join(device, own_segment.name, ...) as member: ...   # an instance; for its native pool
    for ledger in list_ledgers(): print(ledger.device, ledger.free_bytes)
    reap()                                       # every kvctl does this when it starts

A ledger is a file of /dev/shm named by group and device. Its first member makes it and the last one
removes it; whoever joins, leaves or removes holds the file's lock, and looks whether the name still
leads to that file. Bytes are granted in native code, without any lock (vmm_csrc/ledger.h).
"""

from __future__ import annotations

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
from kvelastic.errors import (
    LedgerError,
    LedgerForeignError,
    PoolExhaustedError,
    SegmentBusyError,
    SegmentFormatError,
    is_out_of_descriptors,
)
from kvelastic.lease import Liveness, ProcessIdentity, boot_id, pid_namespace
from kvelastic.ledger_facts import LedgerInfo, Member
from kvelastic.segment_dir import READ_FLAGS, SHM_DIR, WRITE_FLAGS, inode_of, locked, owner_of
from kvelastic.sizes import format_size

__all__ = ["JoinedLedger", "LedgerInfo", "Member", "join", "ledger_path", "list_ledgers", "reap"]

_log = logging.getLogger("kvelastic")

_PREFIX: Final = ".kvelastic_ledger_"
_LOCK_S: Final = 2.0
_JOIN_TRIES: Final = 100


def ledger_path(group: str, device: str) -> Path:
    """Where the ledger of a device lies. It begins with a dot: it is no instance."""
    return SHM_DIR / f"{_PREFIX}{group}_{re.sub(r'[^A-Za-z0-9-]', '-', device)}"


class JoinedLedger:
    """This process's place in a ledger. Close it, or use it as a context manager.

    `member` is what a native pool takes. Closing gives everything back that was granted; the pool
    must not be used after that.
    """

    def __init__(self, path: Path, fd: int, memory: mmap.mmap, member: _vmm.LedgerMember) -> None:
        self.path = path
        self.member = member
        self._fd = fd
        self._memory = memory
        self._pid = os.getpid()
        self._closed = False

    def close(self) -> None:
        """Leave; the last one removes the file. Repeatable; does nothing in a forked child."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        with suppress(SegmentBusyError, OSError), locked(self._fd, self.path.name, _LOCK_S):
            self.member.leave()
            _remove_if_empty(self.path, self._fd, self._memory)
        self.member.leave()  # also where the lock was not to be had; the file stays for gc then
        with suppress(BufferError):
            self._memory.close()  # a pool that is still there keeps it mapped
        os.close(self._fd)

    def linger(self) -> None:
        """Keep the place and what is granted for memory that outlives this object. Repeatable.

        The place goes when the native member is told to leave, or with the processes of the member.
        """
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            os.close(self._fd)

    def __enter__(self) -> JoinedLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(
    device: str,
    *,
    group: str,
    capacity_bytes: int,
    name: str,
    uuid: bytes,
    min_bytes: int = 0,
    priority: int = 0,
) -> JoinedLedger:
    """Become a member of the ledger of `device` (made here if there is none).

    The first member's `capacity_bytes` is the ledger's; a later one that says something else is
    told so in the log. `name` and `uuid` are the segment's. Raises `GuaranteeError` if `min_bytes`
    and the other guarantees are more than the device has, `LedgerForeignError` if another user's
    instances share the device, `LedgerError` if the file is of another version or cannot be made.
    """
    path = ledger_path(group, device)
    me = ProcessIdentity.of_this_process()
    for _ in range(_JOIN_TRIES):
        fd = _open_or_make(path, device, group, capacity_bytes)
        try:
            with _locked_file(fd, path):
                found = _leads_to(path, fd)
                if found:
                    memory = _map(fd, path, mmap.PROT_READ | mmap.PROT_WRITE)
                    _vmm.ledger_reap(memory, pid_namespace())
                    try:
                        member = _vmm.LedgerMember.join(
                            memory,
                            name=name,
                            uuid=uuid,
                            pid=me.pid,
                            start_time_ticks=me.start_time_ticks,
                            pid_namespace=me.pid_namespace,
                            uid=me.uid,
                            min_bytes=min_bytes,
                            priority=priority,
                        )
                    except BaseException:
                        _remove_if_empty(path, fd, memory)  # it may have been made just now
                        raise
        except PoolExhaustedError as error:
            os.close(fd)
            raise LedgerError(f"{path}: {error}; end an instance first") from error
        except BaseException:
            os.close(fd)
            raise
        if not found:  # its last member has just removed it
            os.close(fd)
            continue
        if member.capacity_bytes != capacity_bytes:
            _log.warning(
                "The device %s is shared with instances that count its capacity as %s, not %s;"
                " that holds here too until all of them have ended.",
                device,
                format_size(member.capacity_bytes),
                format_size(capacity_bytes),
            )
        return JoinedLedger(path, fd, memory, member)
    raise LedgerError(f"{path} is removed as fast as it is made")


def list_ledgers() -> list[LedgerInfo]:
    """Every ledger of this machine, by device; also those that this user cannot read.

    Raises `LedgerError` where this process is out of file descriptors.
    """
    found = []
    for path in _paths():
        with suppress(FileNotFoundError):
            found.append(_look(path))
    return sorted(found, key=lambda info: (info.device, info.group))


def reap() -> list[Path]:
    """Free what dead members held, and remove ledgers that have no member; returns those."""
    removed: list[Path] = []
    paths: list[Path] = []
    with suppress(LedgerError):
        paths = _paths()
    for path in paths:
        with suppress(OSError, LedgerError, SegmentBusyError, SegmentFormatError):
            if _reap_one(path):
                removed.append(path)
    return removed


def _paths() -> list[Path]:
    try:
        with os.scandir(SHM_DIR) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if entry.name.startswith(_PREFIX) and entry.is_file(follow_symlinks=False)
            ]
    except OSError as error:
        if is_out_of_descriptors(error):
            raise LedgerError(f"cannot list {SHM_DIR}: {error.strerror}") from error
        return []


def _open_or_make(path: Path, device: str, group: str, capacity_bytes: int) -> int:
    """The open file; one that was not there is complete before it has its name."""
    for _ in range(_JOIN_TRIES):
        try:
            return _open(path, WRITE_FLAGS)
        except FileNotFoundError:
            pass
        temporary = SHM_DIR / f".kvelastic_new_ledger_{os.getpid()}_{os.urandom(6).hex()}"
        fd = -1
        try:
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, _vmm.LEDGER_BYTES)
            with mmap.mmap(fd, _vmm.LEDGER_BYTES) as memory:
                _vmm.ledger_create(
                    memory,
                    device=device,
                    group=group,
                    capacity_bytes=capacity_bytes,
                    uid=os.geteuid(),
                    boot_id=boot_id(),
                    created_realtime_ns=time.time_ns(),
                )
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            os.close(fd)  # another starter was faster
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise LedgerError(f"cannot make a ledger in {SHM_DIR}: {error}") from error
        else:
            return fd
        finally:
            with suppress(OSError):
                temporary.unlink()
    raise LedgerError(f"{path} comes and goes")


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


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return inode_of(path.stat(follow_symlinks=False)) == inode_of(os.fstat(fd))
    except FileNotFoundError:
        return False


def _map(fd: int, path: Path, protection: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(fd, 0, prot=protection)
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
            raw = _vmm.read_ledger(memory)
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
        others_bytes=raw["others_bytes"],
        members=tuple(_member(entry, raw["boot_id"]) for entry in raw["members"]),
    )


_MEMBER_FIELDS: Final = tuple(field.name for field in fields(Member) if field.name != "status")


def _member(entry: dict[str, Any], boot: bytes) -> Member:
    return Member(
        status=_liveness(entry, boot).value, **{name: entry[name] for name in _MEMBER_FIELDS}
    )


def _liveness(entry: dict[str, Any], boot: bytes) -> Liveness:
    """Of the instance: dead when neither its own process nor any with its pages lives."""
    liveness = owner_of(entry | {"boot_id": boot}).liveness()
    for pid, ticks in entry["workers"]:
        if liveness is not Liveness.DEAD:
            break
        worker = {"pid": pid, "start_time_ticks": ticks, "boot_id": boot}
        liveness = owner_of(entry | worker).liveness()
    return liveness


def _reap_one(path: Path) -> bool:
    """Free the dead; remove the file if nobody is left. True: it was removed."""
    fd = _open(path, WRITE_FLAGS)
    try:
        with locked(fd, path.name, _LOCK_S), _map(fd, path, mmap.PROT_READ | mmap.PROT_WRITE) as m:
            _vmm.ledger_reap(m, pid_namespace())
            return _remove_if_empty(path, fd, m)
    finally:
        os.close(fd)


def _remove_if_empty(path: Path, fd: int, memory: mmap.mmap) -> bool:
    """Pre: the file's lock is held, so nobody joins meanwhile."""
    raw = _vmm.read_ledger(memory)
    for entry in raw["members"]:
        if _liveness(entry, raw["boot_id"]) is not Liveness.DEAD:
            return False
    if not _leads_to(path, fd):
        return False
    path.unlink()
    return True
