"""Segments: an instance's control block in POSIX shared memory, named by its file in /dev/shm.

    with segment.create(None, engine="vllm", model="m", device="host") as mine:
        mine.control_block     # the owner's end, for a pool and its maintenance thread
    segment.list_segments()    # of every instance, dead ones marked
    segment.request("kvelastic_vllm_12", limit_bytes=1 << 30, wait_s=5.0)

A segment is filled under a private name and then linked to its real name. The link fails if the
name is taken. So no process sees an incomplete segment, and if two processes start with one name,
exactly one succeeds.
"""

from __future__ import annotations

import atexit
import math
import mmap
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvelastic import _vmm
from kvelastic.closing import Closing
from kvelastic.errors import (
    InvalidArgumentError,
    SegmentDeadError,
    SegmentError,
    SegmentExistsError,
    SegmentFormatError,
    SegmentNotFoundError,
    is_out_of_descriptors,
)
from kvelastic.shared.engine_cores import has_lost_its_server
from kvelastic.shared.liveness import (
    FIRST_WORKER_BYTE,
    SCHEDULER_BYTE,
    Liveness,
    ProcessIdentity,
    hold,
    liveness,
    pid_namespace,
)
from kvelastic.shared.segment_listing import (
    LOCK_WAIT_S,
    READ_FLAGS,
    SHM_DIR,
    WRITE_FLAGS,
    SegmentInfo,
    delete,
    found_name,
    inspect,
    is_kvcached,
    list_segments,
    locked,
    open_file,
    owner_of,
    reap,
    remove_if_reapable,
    unfinished_file,
    unlink_own,
    version_of,
)
from kvelastic.units import format_size

__all__ = [
    "Ack", "Request", "Requested", "Segment", "SegmentInfo", "check_free", "check_name", "create",
    "delete", "inspect", "is_name", "list_segments", "open_readonly", "open_writable", "post",
    "reap", "request",
]  # fmt: skip

ACK_GLANCE_S: Final = 0.2
"""Seconds that `request` waits for a result if `wait_s` is None."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,63}")
_DEATH_CHECK_S: Final = 0.25
_CLAIM_TRIES: Final = 100


@dataclass(frozen=True)
class Request:
    """Settings that one request changes in one step. None leaves a setting unchanged."""

    limit_bytes: int | None = None
    """Upper bound of the memory held; may be 0. `UNLIMITED_BYTES`: no limit."""
    min_bytes: int | None = None
    """Guarantee: other instances do not reclaim memory below this."""
    priority: int | None = None
    """An instance with a higher priority keeps memory longer."""
    asleep: bool | None = None
    """True: sleep, and release all memory as soon as none is in use. False: wake up."""
    trim: bool = False
    """Release all parked pages, once."""

    @property
    def is_empty(self) -> bool:
        """Whether the request changes nothing."""
        return self == Request()


@dataclass(frozen=True)
class Ack:
    """An instance's result of a request.

    `state` is one of applied, shrinking, refused, none (not yet) or failed. Failed means that the
    instance's memory has failed and it has stopped allocating blocks.
    """

    revision: int
    state: str
    effective_limit_bytes: int
    mapped_bytes: int
    over_bytes: int
    reason: str
    acknowledged_ns: int
    min_bytes: int
    priority: int
    requested_revision: int = 0
    """Revision of the caller's request. A larger `revision` belongs to a later request."""
    asleep: bool = False
    """Whether it sleeps. Until it wakes it allocates nothing, and `effective_limit_bytes` is 0."""
    limit_bytes: int = 0
    """The limit in force, as the operator set it. A sleeping instance keeps it."""
    capacity_bytes: int = 0
    """Capacity of its device in bytes; 0 if not yet published."""
    page_bytes: int = 0
    """Page size in bytes, the unit of allocation; 0 if not yet published."""
    engine_asleep: bool | None = None
    """Whether the engine itself sleeps; requests cannot change that. None: not reported."""
    is_unknown: bool = False
    """True if this process cannot determine whether the instance's process lives."""

    @property
    def is_of_the_request(self) -> bool:
        """Whether this is the result of the caller's request, and not of a later one."""
        return self.state != "none" and self.revision == self.requested_revision


class Segment(Closing):
    """An open segment; `control_block` is its mapped control block. Close it, or use `with`.

    The process that created the segment removes its name in `close()` or at exit. Every other
    process, and a forked child of the creator, only unmaps it. Do not close it while another thread
    uses the control block.
    """

    def __init__(
        self,
        name: str,
        fd: int,
        memory: mmap.mmap,
        control_block: _vmm.ControlBlock,
        *,
        owned: bool,
        lock: _vmm.LivenessLock | None = None,
    ) -> None:
        self.name = name
        self.control_block = control_block
        self._memory = memory
        self._fd = fd
        self._owner_pid = os.getpid() if owned else 0
        self._closed = False
        self._liveness_lock = lock
        if owned:
            atexit.register(self.close)

    @property
    def path(self) -> Path:
        """Path of the file in /dev/shm."""
        return SHM_DIR / self.name

    @property
    def is_owner(self) -> bool:
        """Whether this process created the segment; False in a forked child."""
        return self._owner_pid == os.getpid()

    @contextmanager
    def writing(self, timeout_s: float = LOCK_WAIT_S) -> Iterator[_vmm.ControlBlock]:
        """Hold the lock that writers of requests share; the instance never waits for it.

        Raises `SegmentBusyError` if another writer holds the lock for longer than `timeout_s`
        seconds.
        """
        with locked(self._fd, self.name, timeout_s):
            yield self.control_block

    def hold_as_worker(self, rank: int) -> _vmm.LivenessLock | None:
        """Mark this process as the live worker of that rank.

        Holds a lock until it is released or the process ends. Raises the same errors as
        `liveness.hold`.
        """
        return hold(self.path, self._fd, FIRST_WORKER_BYTE + rank)

    def liveness(self) -> Liveness:
        """Return whether the instance lives; makes one system call."""
        return liveness(self._fd, SCHEDULER_BYTE, owner_of(self.control_block.read_header()))

    def close(self) -> None:
        """Unmap the segment; the owner also marks it as closing and removes its name.

        Idempotent. Never blocks.
        """
        if self._closed:
            return
        self._closed = True
        if self.is_owner:
            atexit.unregister(self.close)
            self.control_block.set_closing()
            self._unlink_own()
            if self._liveness_lock is not None:
                self._liveness_lock.release()
        self.control_block.release()
        # A pool or maintenance thread that still holds the control block keeps it mapped.
        with suppress(BufferError):
            self._memory.close()
        os.close(self._fd)

    def _unlink_own(self) -> None:
        with suppress(OSError), locked(self._fd, self.name, 0.0, fail=False):
            unlink_own(self.path, self._fd)


# ------------------------------------------------------------------------------------- instances


def create(
    name: str | None,
    *,
    engine: str,
    model: str = "",
    device: str = "host",
    devices: Sequence[tuple[str, int]] | None = None,
) -> Segment:
    """Create this instance's segment; also remove dead segments.

    `name` is used unchanged (`KVELASTIC_IPC_NAME`). None means `kvelastic_<engine>_<pid>`, with a
    numeric suffix if that name is taken. Each page has one copy, on `device`, unless `devices`
    lists (name, copies) for up to 16 devices.

    Raises `SegmentExistsError` if a live instance, or a file that is not a segment, has the name;
    `InvalidArgumentError` for an invalid name or too many devices; and `SegmentError` if the
    operating system refuses, for example because /dev/shm is full.
    """
    candidates = [check_name(name)] if name is not None else _automatic_names(engine)
    copies = [(device, 1)] if devices is None else list(devices)
    reap()
    for _ in range(_CLAIM_TRIES):
        with suppress(FileNotFoundError):  # another process reaped the unfinished file
            return _create(candidates, engine=engine, model=model, devices=copies)
    raise SegmentError(f"files that begin in {SHM_DIR} are removed as fast as they are made")


def _create(
    candidates: list[str], *, engine: str, model: str, devices: Sequence[tuple[str, int]]
) -> Segment:
    owner = ProcessIdentity.of_this_process()
    # The file is locked before it gets its real name, so that no process sees a live instance's
    # segment without the lock. `SCHEDULER_BYTE` is `MAKER_BYTE`.
    with unfinished_file("segment", _vmm.SEGMENT_BYTES) as (temporary, fd, lock):
        memory = mmap.mmap(fd, _vmm.SEGMENT_BYTES)
        for candidate in candidates:
            control_block = _vmm.ControlBlock.create(
                memory,
                name=candidate,
                engine=_fit(engine, 32),
                model=_fit(model, 256),
                devices=[(_fit(device, 64), copies) for device, copies in devices],
                uuid=os.urandom(16),
                pid=owner.pid,
                start_time_ticks=owner.start_time_ticks,
                boot_id=owner.boot_id,
                pid_namespace=owner.pid_namespace,
                uid=owner.uid,
                created_realtime_ns=time.time_ns(),
            )
            try:
                _claim(temporary, candidate)
            except SegmentExistsError:
                control_block.release()
                if candidate == candidates[-1]:
                    raise
            else:
                return Segment(candidate, fd, memory, control_block, owned=True, lock=lock)
        raise SegmentExistsError("no name is left")  # not reached: there is a last candidate


def _automatic_names(engine: str) -> list[str]:
    plain = re.sub(r"[^A-Za-z0-9]+", "-", engine).strip("-")[:24] or "engine"
    first = f"kvelastic_{plain}_{os.getpid()}"
    return [first, *(f"{first}_{n}" for n in range(2, 100))]


def check_free(name: str) -> None:
    """Raise `SegmentExistsError` if an instance could not use `name` now.

    Removes the segment of a dead instance with this name. A kvcached segment that no instance keeps
    is no obstacle. Raises `InvalidArgumentError` for an invalid name, and `SegmentError` if the
    file cannot be inspected.
    """
    if not _makes_way(found_name(check_name(name))) and not _is_left_by_kvcached(name):
        raise _taken(name)


def _is_left_by_kvcached(name: str) -> bool:
    return found_name(name) == name and is_kvcached(name)


def is_name(name: str) -> bool:
    """Return whether `name` is a valid segment name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return `name` if it is a valid segment name; raise `InvalidArgumentError` if not."""
    if not is_name(name):
        raise InvalidArgumentError(
            f"segment name {name[:100]!r} is not accepted; write 1 to 64 letters, digits and . _ :"
            " @ + - that start with a letter or digit"
        )
    return name


def _fit(text: str, limit_bytes: int) -> str:
    """Truncate text to `limit_bytes` of UTF-8. Keeps the end, the informative part of a path."""
    raw = text.replace("\0", "").encode("utf-8", "replace")
    if len(raw) <= limit_bytes:
        return raw.decode("utf-8")
    return "..." + raw[3 - limit_bytes :].decode("utf-8", "ignore")


def _claim(temporary: Path, name: str) -> None:
    """Link the finished file to its real name, after removing a dead instance's segment there."""
    for _ in range(_CLAIM_TRIES):
        try:
            os.link(temporary, SHM_DIR / name, follow_symlinks=False)
            return
        except FileExistsError:
            pass
        except FileNotFoundError:
            raise  # another process reaped the unfinished file
        except OSError as error:
            raise SegmentError(f"cannot name a segment {name!r}: {error}") from error
        if not _makes_way(name):
            raise _taken(name)
    raise SegmentExistsError(f"the name {name!r} is taken again as fast as it is freed")


def _makes_way(name: str) -> bool:
    try:
        return remove_if_reapable(name)
    except SegmentNotFoundError:
        return True
    except SegmentFormatError:
        return False
    except SegmentError as error:
        if isinstance(error.__cause__, PermissionError):
            return False
        raise


def _taken(name: str) -> SegmentExistsError:
    holder, what_to_do = _holder(name)
    first = f"{what_to_do}, or choose" if what_to_do else "choose"
    return SegmentExistsError(
        f"the name {name!r} is taken by {holder}; {first} another KVELASTIC_IPC_NAME"
    )


def _holder(name: str) -> tuple[str, str]:
    """Return a description of the name's holder and the action that a user can take."""
    path = SHM_DIR / name
    try:
        info = inspect(name)
    except SegmentFormatError:
        return f"a file that is not a segment ({path})", "remove it"
    except SegmentNotFoundError:
        return "an instance that has just ended", "start again"
    except SegmentError:
        return f"another user, who owns {path}", ""
    return _holder_of(info)


def _holder_of(info: SegmentInfo) -> tuple[str, str]:
    if info.status == "unreadable":
        return f"a segment that this version cannot read ({info.problem})", ""
    header, pid = info.header, info.header["pid"]
    who = f"process {pid}"
    if not info.is_ours:
        who += f" of user {header['uid']}"
    if info.status == "dead":
        return f"{who}, which has ended", "have its user run `kvctl gc`"
    if header["pid_namespace"] != pid_namespace():
        return f"{who} of another container", "end it there"
    if info.status == "closing":
        return f"{who}, which is ending", "start again in a moment"
    is_orphan = has_lost_its_server(pid)
    what = "an engine core whose server has ended" if is_orphan else f"which is {info.status}"
    return f"{who}, {what}", f"end it (kill {pid})"


# ----------------------------------------------------------------------------------- operators


def open_readonly(name: str) -> Segment:
    """Map a segment for reading. The name of the instance's kvcached segment will do.

    Raises `SegmentNotFoundError` or `SegmentFormatError`, and `SegmentError` if it cannot be
    opened.
    """
    return _open(name, READ_FLAGS, mmap.PROT_READ)


def open_writable(name: str) -> Segment:
    """Map a segment for writing requests. Raises the same errors as `open_readonly`."""
    return _open(name, WRITE_FLAGS, mmap.PROT_READ | mmap.PROT_WRITE)


def _open(name: str, flags: int, protection: int) -> Segment:
    name = found_name(name)
    fd = open_file(name, flags)
    try:
        if version_of(fd) is None:
            raise SegmentFormatError(f"{SHM_DIR / name} is not a segment")
        memory = _map(fd, name, protection)
        return Segment(name, fd, memory, _vmm.ControlBlock.open(memory), owned=False)
    except BaseException:
        os.close(fd)
        raise


def _map(fd: int, name: str, protection: int) -> mmap.mmap:
    """Map a whole open file; raise `SegmentFormatError` if another process has emptied it."""
    try:
        return mmap.mmap(fd, 0, prot=protection)
    except (OSError, ValueError) as error:
        if is_out_of_descriptors(error):  # Python keeps a descriptor for each mapping
            raise SegmentError(f"cannot map {SHM_DIR / name}: {error}") from error
        raise SegmentFormatError(f"{SHM_DIR / name} cannot be mapped: {error}") from error


class Requested(Closing):
    """A posted request whose result can be awaited. Use it from one thread at a time.

    Returned by `post`. Close it, or use it as a context manager.
    """

    def __init__(self, segment: Segment, revision: int) -> None:
        """Take ownership of `segment`."""
        self._segment = segment
        self._revision = revision
        self._check_s = time.monotonic() + _DEATH_CHECK_S

    def settled(self, wait_s: float = 0.0) -> Ack | None:
        """Return the result once the request is applied or refused, or None after `wait_s` seconds.

        Blocks for at most `wait_s`. Raises `SegmentDeadError` if the instance has ended.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            if self._segment.control_block.wait_ack(
                self._revision, min(left_s, _DEATH_CHECK_S), settled=True
            ):
                return self.now()
            if left_s == 0.0 or time.monotonic() >= self._check_s:
                _check_alive(self._segment, " and did not answer")
                self._check_s = time.monotonic() + _DEATH_CHECK_S
            if left_s == 0.0:
                return None

    def now(self) -> Ack:
        """Return the result so far; `none` or `shrinking` if the request is incomplete."""
        return _ack(self._segment.control_block, self._revision, self._segment.liveness())

    def close(self) -> None:
        """Close the segment; the request remains in force. Idempotent."""
        self._segment.close()


def post(name: str, request: Request, lock_wait_s: float = LOCK_WAIT_S) -> Requested:
    """Write a request like `request`, but return without waiting for the result.

    Blocks for at most `lock_wait_s` seconds while another writer holds the lock. Raises the same
    errors as `request`.
    """
    segment = open_writable(name)
    try:
        _check_alive(segment, "; nothing was changed")
        with segment.writing(lock_wait_s) as control_block:
            if request.min_bytes is not None:
                _check_guarantee(request.min_bytes, request.limit_bytes, control_block)
            revision = control_block.write_request(**vars(request))
        return Requested(segment, revision)
    except BaseException:
        segment.close()
        raise


def request(
    name: str,
    *,
    limit_bytes: int | None = None,
    min_bytes: int | None = None,
    priority: int | None = None,
    asleep: bool | None = None,
    trim: bool = False,
    wait_s: float | None = None,
) -> Ack:
    """Change an instance's settings in one step (see `Request`) and wait for the result.

    Blocks until the request is applied or refused, for at most `wait_s` seconds; None waits for
    `ACK_GLANCE_S`. After a timeout the state of the result is `none` or `shrinking`.

    Raises `InvalidArgumentError` for a priority beyond `sizes.MAX_PRIORITY`, a guarantee above the
    limit, or `wait_s` nan. Raises `SegmentNotFoundError`, `SegmentFormatError` or
    `SegmentBusyError` (another writer holds the lock) with nothing changed. Raises
    `SegmentDeadError` if the instance is dead or dies during the wait.
    """
    if wait_s is not None and math.isnan(wait_s):
        raise InvalidArgumentError("wait_s=nan is not accepted; give seconds, or None")
    with post(name, Request(limit_bytes, min_bytes, priority, asleep, trim)) as requested:
        settled = requested.settled(ACK_GLANCE_S if wait_s is None else max(0.0, wait_s))
        return requested.now() if settled is None else settled


def _check_guarantee(
    min_bytes: int, limit_bytes: int | None, control_block: _vmm.ControlBlock
) -> None:
    """Raise `InvalidArgumentError` if a guarantee is above the limit.

    The limit is that of this request, else of the last pending request, else the limit in force. A
    request for a limit alone may set it below the guarantee, because memory may be short for a
    time.
    """
    # Read the result first. If a new result arrives after that, the request still looks pending,
    # and its limit is the requested one.
    answered, asked, usage = (
        control_block.read_ack(),
        control_block.read_request(),
        control_block.read_usage(),
    )
    if limit_bytes is None and asked["limit_revision"] > answered["revision"]:
        limit_bytes = asked["limit_bytes"]
    most_bytes = usage["limit_bytes"] if limit_bytes is None else limit_bytes
    has_limit = limit_bytes is not None or usage["capacity_bytes"] > 0  # else it is still starting
    if has_limit and min_bytes > most_bytes:
        raise InvalidArgumentError(
            f"a guarantee (min) of {format_size(min_bytes)} is above the limit of"
            f" {format_size(most_bytes)}; raise the limit too, or ask for less"
        )


def _ack(control_block: _vmm.ControlBlock, revision: int, alive: Liveness) -> Ack:
    raw = control_block.read_ack()
    raw.pop("whole")
    if raw["revision"] < revision:
        raw["state"] = "none"
    # An instance publishes its usage before it publishes the result.
    usage = control_block.read_usage()
    limit_bytes, capacity_bytes = usage["limit_bytes"], usage["capacity_bytes"]
    return Ack(
        **raw,
        requested_revision=revision,
        asleep=bool(usage["asleep"]),
        limit_bytes=capacity_bytes if limit_bytes == _vmm.UNLIMITED_BYTES else limit_bytes,
        capacity_bytes=capacity_bytes,
        page_bytes=usage["page_bytes"],
        engine_asleep=control_block.engine_asleep,
        is_unknown=alive is Liveness.UNKNOWN,
    )


def _check_alive(segment: Segment, consequence: str) -> None:
    header = segment.control_block.read_header()
    if segment.liveness() is Liveness.DEAD or header["state"] == "closing":
        raise SegmentDeadError(
            f"the instance of {segment.name!r} (process {header['pid']}) has ended{consequence}"
        )
