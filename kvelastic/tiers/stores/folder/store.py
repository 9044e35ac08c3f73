"""A store that keeps demoted blocks in a folder shared by several machines (NFS or similar).

    store = FolderStore("/mnt/shared/kv", record_bytes, limit_bytes=500 << 30)

This is the remote store for sites without a Mooncake server. Each record is one file. The machines
need not know each other: a record is written under a temporary name and then renamed to its key, so
readers see a whole file or none. Every read verifies key, length and checksum. Reads of other
machines' files are bounded, and links are never followed.

**A checksum is no authentication.** Anyone who can write to the folder can feed wrong KV to every
machine, and anyone who can read it can read prompts. Restrict it to the engines' user. A
world-writable folder is refused.

Sweeping enforces the limit: it removes the files that were written longest ago. One engine sweeps
at a time, a minute after its last sweep or once it has written 1/8 of the limit. It reads the whole
folder, in a thread of its own. Until it ends the folder may exceed its limit by what the engines
write. Holds protect nothing: another machine may sweep.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.file_lock import lock_within
from kvelastic.tier_list import fault_of_shared, reason_of
from kvelastic.tiers.base import (
    Capacity,
    Selection,
    Store,
    Unerased,
    check_size,
    each_key,
)
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.owned_files import open_folder
from kvelastic.tiers.stores.circuit_breaker import CircuitBreaker
from kvelastic.tiers.stores.folder import format as folder_format
from kvelastic.tiers.stores.folder.erase import erase
from kvelastic.tiers.stores.folder.format import HEAD_BYTES
from kvelastic.tiers.stores.record_owner import Owner, owner_of, wanted_by
from kvelastic.tiers.workers import Call, Workers

_log = logging.getLogger("kvelastic")

SWEEP_EVERY_S: Final = 60.0
ABANDONED_S: Final = 3600.0
"""Age after which a temporary file counts as abandoned."""
_SWEEP_LOCK: Final = ".sweep"
_FILL: Final = 0.9
"""A sweep that removes anything continues down to this fraction of the limit."""
_AT_ONCE: Final = 8
"""Number of concurrent file operations, because a remote server has a high latency."""
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_A = TypeVar("_A")
_T = TypeVar("_T")


class FolderStore(Store):
    """A store in a shared folder. See the module text.

    Any thread may call. Every call accesses the file system and may block.
    """

    name = "folder"
    asks_medium = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        record_bytes: int,
        namespace: Namespace | None = None,
        *,
        limit_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`limit_bytes` bounds the records of every machine; None: no bound.

        Raises `InvalidArgumentError` if the path is a link or not a folder, if the folder is
        world-writable, or if a size is invalid.
        """
        super().__init__(record_bytes)
        if limit_bytes is not None:
            check_size("limit_bytes", limit_bytes)
        self._path = os.path.abspath(os.fspath(path))  # noqa: PTH100
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._owner = owner_of(namespace or Namespace(model=""))
        self._lock = threading.RLock()
        self._breaker = CircuitBreaker(clock)
        self._closed = False
        self._records: int | None = None  # as of the last listing, plus this engine's changes
        self._other_bytes = 0
        self._unerased = ""
        self._unswept_bytes = 0
        self._sweep_at_s = float("-inf")
        self._calls = Workers("kvelastic-folder", _AT_ONCE)
        self._sweeper = Workers("kvelastic-sweep")
        self._sweeping: Call[None] | None = None
        """The last sweep that a put has started."""
        with self._medium():
            os.close(open_folder(self._path, fault_of_shared))

    # --- the contract -----------------------------------------------------------------------------

    def enter(self, namespace: Namespace) -> None:
        """Set the namespace of later puts."""
        with self._lock:
            self._owner = owner_of(namespace)

    def has(self, keys: bytes) -> list[bool]:
        """Return for each key whether its file exists.

        Blocks; another machine may change it anytime.
        """
        count = self._count_of(keys)
        if not self._may_call():
            return [False] * count
        with self._medium(), self._root() as root:
            return self._at_once(
                lambda key: folder_format.is_there(root, key, self.record_bytes), each_key(keys)
            )
        return [False] * count

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """Store records; return for each key whether it is present. Blocks until written.

        Sweeps go by age and ignore `chain_after`.
        """
        count = self._count_of(keys, records, chain_after)
        if not self._may_call():
            self._count(refused=count)
            return [False] * count
        owner = self._owner
        outcome = [""] * count
        with self._medium(), self._root() as root:
            outcome = self._at_once(
                lambda one: self._put_one(root, one[0], one[1], owner),
                list(zip(each_key(keys), records, strict=True)),
            )
        stored = outcome.count("stored")
        self._count(
            puts=stored,
            refused=outcome.count(""),
            bytes_written=stored * (HEAD_BYTES + self.record_bytes),
        )
        self._sweep_if_due(stored)
        return [each != "" for each in outcome]

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """Read records; return for each key whether its view is complete. Removes damaged files."""
        count = self._count_of(keys, into)
        outcome = [""] * count
        if self._may_call():
            with self._medium(), self._root() as root:
                outcome = self._at_once(
                    lambda one: self._get_one(root, one[0], one[1]),
                    list(zip(each_key(keys), into, strict=True)),
                )
        hits = outcome.count("whole")
        self._count(
            hits=hits,
            misses=count - hits,
            torn=outcome.count("torn"),
            bytes_read=hits * self.record_bytes,
        )
        return [each == "whole" for each in outcome]

    def erase(self, keys: bytes) -> int:
        """Erase these keys at once, for all machines; return how many were present."""
        self._count_of(keys)
        removed: list[bool] = []
        if not self._closed:  # even while calls are suspended after a failure
            with self._medium(), self._root() as root:
                removed = self._at_once(lambda key: self._remove(root, key.hex()), each_key(keys))
        return sum(removed)

    def erase_matching(self, selection: Selection) -> int:
        """Erase the selected records of every machine; return how many.

        Reads the head of every file. A selected record that another machine is writing will not be
        stored.
        """
        removed = 0
        if self._closed:
            return removed
        self._unerased = f"{self._path} could not be looked at"
        with self._medium(), self._root() as root:
            removed, problems = erase(root, wanted_by(selection, self._wall_clock()))
            for problem in problems:
                self._failed(problem)
            self._unerased = ""
            if problems:
                self._unerased = f"{len(problems)} files or folders were left: {problems[0]}"
        with self._lock:
            self._records = None  # list again
        return removed

    def unerased(self) -> Unerased:
        """Return what earlier erasures could not remove, as text for an operator."""
        return Unerased(failed=self._unerased)

    def capacity(self) -> Capacity:
        """Return the usage as of this engine's first call or last sweep, plus its own changes."""
        if self._records is None and self._may_call():
            with self._medium(), self._root() as root:
                self._take_stock(list(self._files(root)))
        with self._lock:
            records = self._records or 0
            used_bytes = records * self.record_bytes + self._other_bytes
            return Capacity(used_bytes, self._limit_bytes, records)

    @property
    def least_limit_bytes(self) -> int:
        """Return the size of one file."""
        return HEAD_BYTES + self.record_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Set the limit for the records of every machine, and sweep at once.

        Raises `InvalidArgumentError` if the store was opened without a limit: other engines sweep
        then.
        """
        check_size("limit_bytes", limit_bytes)
        if self._limit_bytes is None:
            raise InvalidArgumentError("this folder store was opened without a limit")
        with self._lock:
            self._limit_bytes = limit_bytes
        self._sweep(wait=True)

    def problem(self) -> str:
        """Return why the file system refuses calls now, for an operator; empty if it works."""
        return self._breaker.problem

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if the key in a file differs from its name."""
        if not self._may_call():
            return
        with self._medium(), self._root() as root:
            for name, _ in self._files(root):
                entry = folder_format.head(root, name)
                if entry is not None and entry.key.hex() != name:
                    raise IntegrityError(f"folder store: {name} has the record {entry.key.hex()}")

    def close(self) -> None:
        """Close the store; its files stay for other machines."""
        with self._lock:
            self._closed = True
        self._calls.close()
        self._sweeper.close()

    # --- one record -------------------------------------------------------------------------------

    def _put_one(self, root: int, key: bytes, record: memoryview, owner: Owner) -> str:
        """Return "stored", "there" if the key was present before, or "" on failure."""
        try:
            if folder_format.is_there(root, key, self.record_bytes):
                return "there"
            now_ns = max(0, int(self._wall_clock() * 1e9))
            folder_format.write(root, key, record, owner, now_ns)
        except OSError as error:
            self._failed(error)
            return ""
        with self._lock:
            if self._records is not None:
                self._records += 1
        return "stored"

    def _get_one(self, root: int, key: bytes, view: memoryview) -> str:
        """Return "whole", "torn" (file removed), or "" if the record is absent or unreadable."""
        try:
            if folder_format.read(root, key, view):
                return "whole"
        except FileNotFoundError:
            return ""
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link, which no engine creates
                self._failed(error)
            return ""
        self._remove(root, key.hex())
        return "torn"

    def _remove(self, root: int, name: str) -> bool:
        try:
            removed = folder_format.remove(root, name)
        except OSError as error:
            self._failed(error)
            return False
        with self._lock:
            if removed and self._records:
                self._records -= 1
        return removed

    def _files(self, root: int) -> Iterator[tuple[str, os.stat_result]]:
        return folder_format.files(root, self._wall_clock() - ABANDONED_S)

    # --- sweeping ---------------------------------------------------------------------------------

    def _sweep_if_due(self, stored: int) -> None:
        with self._lock:
            self._unswept_bytes += stored * self.record_bytes
            if self._limit_bytes is None:
                return
            if self._sweeping is not None and not self._sweeping.ended.is_set():
                return
            much = self._unswept_bytes > self._limit_bytes // 8
            if not much and self._clock() < self._sweep_at_s:
                return
            self._sweeping = self._sweeper.submit(partial(self._sweep, wait=False))

    def _sweep(self, *, wait: bool) -> None:
        """Remove records above the limit, unless another engine is sweeping."""
        if not self._may_call():
            return
        with self._medium(), self._root() as root:
            lock = os.open(_SWEEP_LOCK, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=root)
            try:
                if not lock_within(lock, 2.0 if wait else 0.0):
                    return
                with self._lock:
                    self._unswept_bytes = 0
                self._sweep_locked(root)
                with self._lock:
                    self._sweep_at_s = self._clock() + SWEEP_EVERY_S
            finally:
                os.close(lock)

    def _sweep_locked(self, root: int) -> None:
        files = sorted(self._files(root), key=lambda one: one[1].st_mtime_ns)
        total = sum(state.st_size for _, state in files)
        limit = self._limit_bytes
        goal = total if limit is None or total <= limit else int(limit * _FILL)
        kept = []
        for name, state in files:
            if total > goal and self._remove(root, name):
                total -= state.st_size
                self._count(evicted=1)
            else:
                kept.append((name, state))
        self._take_stock(kept)

    def _take_stock(self, files: Iterable[tuple[str, os.stat_result]]) -> None:
        sizes = [state.st_size for _, state in files]
        own = HEAD_BYTES + self.record_bytes
        with self._lock:
            self._records = sizes.count(own)
            self._other_bytes = sum(size for size in sizes if size != own)

    # --- the medium -------------------------------------------------------------------------------

    def _may_call(self) -> bool:
        return not self._closed and self._breaker.allows_calls

    @contextmanager
    def _root(self) -> Iterator[int]:
        try:
            fd = open_folder(self._path, fault_of_shared)
        except InvalidArgumentError as error:  # it changed after opening: treat as a failure
            raise OSError(errno.EPERM, str(error)) from error
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _medium(self) -> Iterator[None]:
        """Catch and count errors of the file system, and suspend calls for a while."""
        try:
            yield
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        _log.debug("folder tier: %s", error)
        self._count(errors=1)
        self._breaker.failed(reason_of(error))

    def _at_once(self, call: Callable[[_A], _T], each: Sequence[_A]) -> list[_T]:
        """Call for each item, several concurrently; return the results in order."""
        errors = self._counts["errors"]
        answers = self._calls.map(call, each) if len(each) > 1 else [call(one) for one in each]
        if self._counts["errors"] == errors:
            self._breaker.worked()
        return answers
