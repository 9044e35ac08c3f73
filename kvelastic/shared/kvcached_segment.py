"""kvcached's segment: a file in /dev/shm through which kvcached's clients read and limit memory.

    own, file = create("chat", engine="vLLM", devices=[("host", 1)])   # `chat.kvelastic`, `chat`
    file.start()        # once the instance handles requests
    file.close()        # before the instance's own segment

The file holds three little-endian int64: the limit, the memory in use, and the memory mapped ahead
of need, in bytes. It holds nothing else, because kvcached recognizes it by its size of 24 bytes. A
client takes `flock` and writes the limit. One thread of the instance, blocked in `poll`, watches
the file:

- inotify wakes it when a process closes the file after writing, or removes or renames the file. It
  also wakes when a process closes the instance's own segment after writing (`kvctl limit`).
- A timeout wakes it to publish the usage, because no system call reports a mapped page. It also
  notices a limit of a client that keeps its mapping of the file, because the kernel reports no
  store into memory.

The thread turns a client's limit into an ordinary request in the instance's own segment, where it
is acknowledged. *Rule*: the last writer wins. If a client and an operator have both changed the
limit since the file and the instance last agreed, the instance's own limit wins and is written
back. 0 and negative limits are ignored, as in kvcached.

The thread never waits for a lock that another process holds. Without the lock it publishes only the
usage, which no client writes, and leaves the limit for the next event or timeout. It uses `pread`
and `pwrite` instead of a mapping: if a client truncates a mapped file, an access to it ends the
process.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import re
import select
import stat
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from kvelastic import _vmm
from kvelastic.errors import SegmentBusyError, SegmentError, SegmentExistsError
from kvelastic.shared import segment
from kvelastic.shared.liveness import MAKER_BYTE, hold
from kvelastic.shared.segment_listing import (
    KVCACHED_BYTES,
    READ_FLAGS,
    SHM_DIR,
    WRITE_FLAGS,
    inode_of,
    own_name,
)
from kvelastic.sizes import format_size

_log = logging.getLogger("kvelastic")

_VALUES: Final = struct.Struct("<3q")
_MODE: Final = 0o600
_MOST_NAMES: Final = 100

_INTERVAL_MS: Final = 25
"""Longest time between two looks, each of three system calls."""
_NAME_INTERVAL_S: Final = 0.25
"""Longest time until a name that inotify does not watch is looked up again."""

_IN_ATTRIB: Final = 0x4
"""Also reports the removal of a name."""
_IN_CLOSE_WRITE: Final = 0x8
_IN_MOVE_SELF: Final = 0x800
_EVENT_BYTES: Final = 4096


def create(
    name: str | None, *, engine: str, model: str = "", devices: Sequence[tuple[str, int]]
) -> tuple[segment.Segment, KvcachedSegment]:
    """Create an instance's own segment, named `own_name(name)`, and kvcached's, named `name`.

    Characters that kvcached does not accept in `name` become hyphens, as in kvcached. None means
    `kvcached_<engine>_<process group>`, with a numeric suffix if that name is taken. A file that
    kvcached or a dead instance left behind is reused. Raises the errors of `segment.create`, and
    `SegmentExistsError` if the name belongs to another kind of file or to another user's file.
    """
    if name is not None:
        names = [re.sub(r"[^A-Za-z0-9_-]", "-", name)]
    else:
        plain = re.sub(r"[^A-Za-z0-9]+", "-", engine)[:24]
        first = f"kvcached_{plain}_{os.getpgrp()}"
        names = [first, *(f"{first}_{number}" for number in range(1, _MOST_NAMES))]
    for candidate in names:
        try:
            own = segment.create(own_name(candidate), engine=engine, model=model, devices=devices)
        except SegmentExistsError:
            if candidate == names[-1]:
                raise
            continue
        try:
            return own, KvcachedSegment(candidate, own)
        except BaseException as error:
            own.close()
            if not isinstance(error, SegmentExistsError) or candidate == names[-1]:
                raise
    raise AssertionError("the last candidate returns or raises")


def _capped(limit_bytes: int, usage: Mapping[str, Any]) -> int:
    """Return the limit, or the capacity if that is less: both mean the same."""
    capacity_bytes: int = usage["capacity_bytes"]
    return min(limit_bytes, capacity_bytes or limit_bytes)


class KvcachedSegment:
    """kvcached's segment of one instance. Only the creating process removes it, in `close()`."""

    def __init__(self, name: str, own: segment.Segment) -> None:
        """Create or reuse the file. Raises `SegmentExistsError` or `SegmentError`."""
        self.name = name
        self._path = SHM_DIR / name
        self._own = own
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._complained = ""
        self._fd = -1
        self._life: _vmm.LifeLock | None = None
        self._agreed_bytes = 0
        """The instance's limit, at most the capacity, when the file last agreed with it."""
        self._inotify = self._stop = self._own_fd = -1
        try:
            self._open()
            self._publish_all(self._values())
        except BaseException as error:
            self._remove()
            if isinstance(error, OSError) and not isinstance(error, SegmentError):
                raise SegmentError(f"cannot write {self._path}: {error.strerror}") from error
            raise

    def start(self) -> None:
        """Start the thread. Call this once the instance handles requests.

        Raises `SegmentError` if inotify cannot watch the files.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        self._add_watch = libc.inotify_add_watch
        self._inotify = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._inotify < 0:
            why = os.strerror(ctypes.get_errno())
            raise SegmentError(
                f"cannot watch {self._path}: {why}; raise fs.inotify.max_user_instances, or set"
                " KVELASTIC_KVCACHED_SEGMENT=false"
            )
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._own_fd = os.open(self._own.path, READ_FLAGS)
        self._watch(self._own_fd, _IN_CLOSE_WRITE)
        self._watch_file()
        agreed = _VALUES.pack(self._agreed_bytes, 0, 0)
        values = self._values()
        if not self._publish_under_lock(values, agreed) and self._read()[:8] != agreed[:8]:
            self._agreed_bytes = values[0]  # a client has set the limit in the file
        self._thread = threading.Thread(target=self._run, name="kvcached-segment", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, wait for it, and remove the file. Idempotent. No effect in a child."""
        if self._pid != os.getpid():
            return
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.set()
            os.eventfd_write(self._stop, 1)
            thread.join()
        self._remove()
        for fd in (self._inotify, self._stop, self._own_fd):
            if fd >= 0:
                os.close(fd)
        self._inotify = self._stop = self._own_fd = -1

    # ------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._inotify, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        name_s = 0.0
        while True:
            has_events = bool(poll.poll(_INTERVAL_MS))
            if self._stopped.is_set():
                return
            if has_events:
                with suppress(BlockingIOError):
                    os.read(self._inotify, _EVENT_BYTES)
            try:
                if has_events or time.monotonic() >= name_s:
                    name_s = time.monotonic() + _NAME_INTERVAL_S
                    self._keep_name()
                if self._fd >= 0:
                    self._look()
                    self._complained = ""
            except (OSError, SegmentError) as error:
                # The instance works without the file, and tries again.
                self._complain(str(error))

    def _keep_name(self) -> None:
        """Open or create the file again if the name does not refer to the open file."""
        if self._is_in_place():
            return
        # A client may have replaced the file by a new one, with a limit.
        self._release()
        is_new = self._open()
        self._watch_file()
        if is_new:
            self._publish_under_lock(self._values(), b"")

    def _look(self) -> None:
        """Synchronize file and instance."""
        values = self._values()
        raw = self._read()
        if len(raw) != KVCACHED_BYTES:
            self._publish_under_lock(values, raw)
            return
        limit_bytes, *usage = _VALUES.unpack(raw)
        if limit_bytes == self._agreed_bytes == values[0]:
            if usage != values[1:]:
                self._publish_usage(values)
            return
        capped_bytes = _capped(limit_bytes, self._own.record.read_usage())
        is_news = limit_bytes > 0 and capped_bytes != self._agreed_bytes
        if is_news and values[0] == self._agreed_bytes:
            self._request(limit_bytes)
            self._publish_usage(values)
        elif not self._publish_under_lock(values, raw):
            self._publish_usage(values)
        elif is_news:
            _log.debug("%s: a limit of %d bytes is not taken over", self._path, limit_bytes)

    def _request(self, limit_bytes: int) -> None:
        """Request a client's limit in the instance's own segment.

        If another writer holds that segment's lock, or has just changed the limit, this has no
        effect, and the next look decides.
        """
        request = segment.Request(limit_bytes=limit_bytes)
        with suppress(SegmentBusyError), self._own.writing(timeout_s=0.0) as record:
            if self._values()[0] != self._agreed_bytes:
                return
            record.write_request(**vars(request))
            self._agreed_bytes = _capped(limit_bytes, self._own.record.read_usage())
            _log.info(
                "A kvcached client has set the limit to %s, by %s.",
                format_size(limit_bytes),
                self._path,
            )

    # -------------------------------------------------------------------------------- the file

    def _values(self) -> list[int]:
        """Return the file's three values for the instance's state, including a pending limit."""
        record = self._own.record
        # The instance publishes usage before the acknowledgement, and this reads them in reverse
        # order. So a requested limit is either pending or included in the usage.
        answer, request, usage = record.read_answer(), record.read_request(), record.read_usage()
        limit_bytes = usage["limit_bytes"]
        if request["limit_revision"] > answer["revision"]:
            limit_bytes = request["limit_bytes"]
        parked_bytes = usage["parked_bytes"]
        return [
            _capped(limit_bytes, usage),
            max(0, usage["mapped_bytes"] - parked_bytes),
            parked_bytes,
        ]

    def _read(self) -> bytes:
        """Return what the file holds, and at most a byte more than it should."""
        return os.pread(self._fd, KVCACHED_BYTES + 1, 0)

    def _publish_usage(self, values: list[int]) -> None:
        os.pwrite(self._fd, _VALUES.pack(*values)[8:], 8)

    def _publish_all(self, values: list[int]) -> None:
        """Write all values. A limit that a client has written is lost."""
        os.pwrite(self._fd, _VALUES.pack(*values), 0)
        if os.fstat(self._fd).st_size > KVCACHED_BYTES:
            os.ftruncate(self._fd, KVCACHED_BYTES)
        self._agreed_bytes = values[0]

    def _publish_under_lock(self, values: list[int], seen: bytes) -> bool:
        """Write all values if the file still holds the limit that was `seen`.

        Return False, with nothing written, if a client has set another one, or holds the lock.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            if self._read()[:8] != seen[:8]:
                return False
            self._publish_all(values)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def _is_in_place(self) -> bool:
        """Return True if the name still refers to the open file."""
        if self._fd < 0:
            return False
        try:
            state = self._path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        return inode_of(state) == inode_of(os.fstat(self._fd))

    def _open(self) -> bool:
        """Open or create the file, and take its liveness lock. Return True if it was created."""
        try:
            fd = os.open(self._path, WRITE_FLAGS | os.O_CREAT | os.O_EXCL, _MODE)
            is_new = True
        except FileExistsError:
            fd, is_new = self._open_existing(), False
        except OSError as error:
            raise SegmentError(f"cannot make {self._path}: {error.strerror}") from error
        try:
            self._life = hold(self._path, fd, MAKER_BYTE)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return is_new

    def _open_existing(self) -> int:
        try:
            fd = os.open(self._path, WRITE_FLAGS)
        except OSError as error:
            raise self._taken(error.strerror or str(error)) from error
        state = os.fstat(fd)
        if (
            not stat.S_ISREG(state.st_mode)
            or state.st_size > KVCACHED_BYTES
            or state.st_uid != os.geteuid()
        ):
            os.close(fd)
            raise self._taken("it is not kvcached's segment, or another user's")
        return fd

    def _taken(self, why: str) -> SegmentExistsError:
        return SegmentExistsError(
            f"{self._path} cannot be kvcached's segment of this instance: {why}; remove it, or"
            " choose another KVCACHED_IPC_NAME"
        )

    def _watch_file(self) -> None:
        self._watch(self._fd, _IN_CLOSE_WRITE | _IN_ATTRIB | _IN_MOVE_SELF)

    def _watch(self, fd: int, events: int) -> None:
        # By descriptor, because the name may already refer to another file. The kernel removes a
        # watch together with its file.
        if self._add_watch(self._inotify, f"/proc/self/fd/{fd}".encode(), events) < 0:
            why = os.strerror(ctypes.get_errno())
            raise SegmentError(
                f"cannot watch {self._path}: {why}; raise fs.inotify.max_user_watches"
            )

    def _remove(self) -> None:
        with suppress(OSError):
            if self._is_in_place():
                self._path.unlink()
        self._release()

    def _release(self) -> None:
        if self._life is not None:
            self._life.release()
            self._life = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _complain(self, problem: str) -> None:
        if problem != self._complained:
            self._complained = problem
            _log.warning("kvcached's segment %s is not kept: %s", self.name, problem)
