"""Demoted blocks in a folder that several machines share (NFS and the like): a file a record.

    store = FolderStore("/mnt/shared/kv", record_bytes, limit_bytes=500 << 30)

It is the remote store where there is no Mooncake server. No machine has to know of the others: a
record is written under a name of its own and then renamed to its key's, so it is there whole or not
at all, and every read compares key, length and checksum. What others have written is read with
bounds, and no link is followed.

**A checksum is no authentication.** Who may write in the folder can feed every machine wrong KV,
and who may read in it can read prompts. Give it to the engines' user alone; a folder that all may
write is refused.

A limit is kept by sweeping: one engine at a time, at most every minute or after an eighth of the
limit was written by it, removes what was written longest ago. In between the folder may be above
its limit by what the engines write meanwhile. Leases hold nothing here: another machine may sweep.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, TypeVar

from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.tiers import folder_record
from kvelastic.tiers.base import (
    KEY_BYTES,
    Capacity,
    Lease,
    Selection,
    Store,
    StoreStatistics,
    Unerased,
)
from kvelastic.tiers.folder_erase import erase
from kvelastic.tiers.folder_record import HEAD_BYTES
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.owned_files import lock_within, reason_of
from kvelastic.tiers.parallel_calls import ParallelCalls
from kvelastic.tiers.quiet import Quiet
from kvelastic.tiers.record_owner import Owner, owner_of, wanted_by

_log = logging.getLogger("kvelastic")

SWEEP_EVERY_S: Final = 60.0
ABANDONED_S: Final = 3600.0
"""After this a file that was begun and not renamed is taken for left behind."""
_SWEEP_LOCK: Final = ".sweep"
_FILL: Final = 0.9
"""A sweep that removes anything removes down to this part of the limit."""
_AT_ONCE: Final = 8
"""Files under way at once: a server far away takes its time for each."""
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_A = TypeVar("_A")
_T = TypeVar("_T")


class _NoLease(Lease):
    def __init__(self, count: int) -> None:
        self.count = count

    def release(self) -> None:
        """Nothing is held."""


class FolderStore(Store):
    """See the module. Any thread may call; every call asks the file system, and may block."""

    name = "folder"
    asks_medium = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        record_bytes: int,
        namespace: Namespace | None = None,
        *,
        limit_bytes: int | None = None,
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`limit_bytes` and `max_age_s` bound what lies there, whoever wrote it; None: no bound.

        Raises `InvalidArgumentError` for a path that is a link or no folder, for one that all
        may write, and for sizes that cannot be.
        """
        if record_bytes <= 0:
            raise InvalidArgumentError(f"records of {record_bytes} bytes; give 1 or more")
        _check_limit(limit_bytes)
        self.record_bytes = record_bytes
        self._path = os.path.abspath(os.fspath(path))  # noqa: PTH100
        self._limit_bytes = limit_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._owner = owner_of(namespace or Namespace(model=""))
        self._lock = threading.RLock()
        self._figures = StoreStatistics()
        self._quiet = Quiet(clock)
        self._problem = ""
        self._closed = False
        self._records: int | None = None  # as last listed, and changed since by this engine
        self._other_bytes = 0
        self._unerased = ""
        self._unswept_bytes = 0
        self._sweep_at_s = float("-inf")
        self._calls = ParallelCalls("kvelastic-folder", _AT_ONCE)
        with self._medium():
            os.close(self._open_root())

    # --- the contract -----------------------------------------------------------------------------

    def enter(self, namespace: Namespace) -> None:
        """As `Store.enter`."""
        with self._lock:
            self._owner = owner_of(namespace)

    def has(self, keys: bytes) -> list[bool]:
        """As `Store.has`; asks the file system. What it says may be untrue a moment later."""
        count = self._count_of(keys)
        if not self._may_call():
            return [False] * count
        with self._medium(), self._root() as root:
            return self._at_once(
                lambda key: folder_record.is_there(root, key, self.record_bytes), _each(keys)
            )
        return [False] * count

    def lease(self, keys: bytes) -> Lease:
        """The leading keys that are there now. They are not held: others may remove them."""
        answers = self.has(keys)
        return _NoLease(answers.index(False) if False in answers else len(answers))

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """As `Store.put`. The order in which chains are swept is by age, not by `chain_after`."""
        count = self._count_of(keys, records)
        self._count_of(chain_after or b"")
        if not self._may_call():
            self._count(refused=count)
            return [False] * count
        owner = self._owner
        outcome = [""] * count
        with self._medium(), self._root() as root:
            outcome = self._at_once(
                lambda one: self._put_one(root, one[0], one[1], owner),
                list(zip(_each(keys), records, strict=True)),
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
        """As `Store.get`. What is not whole is removed."""
        count = self._count_of(keys, into)
        outcome = [""] * count
        if self._may_call():
            with self._medium(), self._root() as root:
                outcome = self._at_once(
                    lambda one: self._get_one(root, one[0], one[1]),
                    list(zip(_each(keys), into, strict=True)),
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
        """As `Store.erase`; at once, and for all machines."""
        self._count_of(keys)
        removed: list[bool] = []
        if not self._closed:  # also while a file system that has failed is left alone
            with self._medium(), self._root() as root:
                removed = self._at_once(lambda key: self._remove(root, key.hex()), _each(keys))
        return sum(removed)

    def erase_matching(self, selection: Selection) -> int:
        """As `Store.erase_matching`, whoever wrote it. Reads the head of every file.

        A record that another machine is writing is not stored if it is selected.
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
            self._records = None  # to be listed again
        return removed

    def unerased(self) -> Unerased:
        """As `Store.unerased`."""
        return Unerased(failed=self._unerased)

    def capacity(self) -> Capacity:
        """What lies there by the last look, which was this engine's first call or last sweep."""
        with self._lock:
            if self._records is None and self._may_call():
                with self._medium(), self._root() as root:
                    self._take_stock(list(self._files(root)))
            records = self._records or 0
            used_bytes = records * self.record_bytes + self._other_bytes
            return Capacity(used_bytes, self._limit_bytes, records)

    @property
    def least_limit_bytes(self) -> int:
        """As `Store.least_limit_bytes`: a file."""
        return HEAD_BYTES + self.record_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """As `Store.set_limit`, for what all machines have written; sweeps at once.

        Raises `InvalidArgumentError` where the store was opened without a limit: then others sweep.
        """
        _check_limit(limit_bytes)
        if self._limit_bytes is None:
            raise InvalidArgumentError("this folder store was opened without a limit")
        with self._lock:
            self._limit_bytes = limit_bytes
        self._sweep(wait=True)

    def statistics(self) -> StoreStatistics:
        """As `Store.statistics`."""
        with self._lock:
            return self._figures

    def problem(self) -> str:
        """As `Store.problem`."""
        with self._lock:
            return self._problem

    def check_integrity(self) -> None:
        """Raises `IntegrityError` where a file says that it is another key's than its name's."""
        if not self._may_call():
            return
        with self._medium(), self._root() as root:
            for name, _ in self._files(root):
                entry = folder_record.head(root, name)
                if entry is not None and entry.key.hex() != name:
                    raise IntegrityError(f"folder store: {name} has the record {entry.key.hex()}")

    def close(self) -> None:
        """As `Store.close`."""
        with self._lock:
            self._closed = True
        self._calls.close()

    # --- one record -------------------------------------------------------------------------------

    def _put_one(self, root: int, key: bytes, record: memoryview, owner: Owner) -> str:
        """Answers stored, there (from before), or nothing where it failed."""
        try:
            if folder_record.is_there(root, key, self.record_bytes):
                return "there"
            now_ns = max(0, int(self._wall_clock() * 1e9))
            folder_record.write(root, key, record, owner, now_ns)
        except OSError as error:
            self._failed(error)
            return ""
        with self._lock:
            if self._records is not None:
                self._records += 1
        return "stored"

    def _get_one(self, root: int, key: bytes, view: memoryview) -> str:
        """Answers whole, torn (it is removed), or nothing where it is not there."""
        try:
            if folder_record.read(root, key, view):
                return "whole"
        except FileNotFoundError:
            return ""
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link: nobody of us has made it
                self._failed(error)
            return ""
        self._remove(root, key.hex())
        return "torn"

    def _remove(self, root: int, name: str) -> bool:
        try:
            removed = folder_record.remove(root, name)
        except OSError as error:
            self._failed(error)
            return False
        with self._lock:
            if removed and self._records:
                self._records -= 1
        return removed

    def _files(self, root: int) -> Iterator[tuple[str, os.stat_result]]:
        return folder_record.files(root, self._wall_clock() - ABANDONED_S)

    # --- sweeping ---------------------------------------------------------------------------------

    def _is_older(self, state: os.stat_result, age_s: float) -> bool:
        return state.st_mtime < self._wall_clock() - age_s

    def _sweep_if_due(self, stored: int) -> None:
        with self._lock:
            self._unswept_bytes += stored * self.record_bytes
            if self._limit_bytes is None and self._max_age_s is None:
                return
            much = self._limit_bytes is not None and self._unswept_bytes > self._limit_bytes // 8
            if not much and self._clock() < self._sweep_at_s:
                return
        self._sweep(wait=False)

    def _sweep(self, *, wait: bool) -> None:
        """Remove what is too old or too much, unless another engine does just that."""
        if not self._may_call():
            return
        with self._medium(), self._root() as root:
            lock = os.open(_SWEEP_LOCK, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=root)
            try:
                if not lock_within(lock, 2.0 if wait else 0.0):
                    return
                with self._lock:
                    self._sweep_at_s = self._clock() + SWEEP_EVERY_S
                    self._unswept_bytes = 0
                self._sweep_locked(root)
            finally:
                os.close(lock)

    def _sweep_locked(self, root: int) -> None:
        files = sorted(self._files(root), key=lambda one: one[1].st_mtime_ns)
        total = sum(state.st_size for _, state in files)
        limit = self._limit_bytes
        goal = total if limit is None or total <= limit else int(limit * _FILL)
        kept = []
        for name, state in files:
            old = self._max_age_s is not None and self._is_older(state, self._max_age_s)
            if (old or total > goal) and self._remove(root, name):
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
        return not self._closed and self._quiet.is_over

    def _open_root(self) -> int:
        try:
            os.makedirs(self._path, 0o700, exist_ok=True)  # noqa: PTH103  (EEXIST for a link)
            fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.EEXIST}:
                raise InvalidArgumentError(
                    f"{self._path} is a link or no folder; give a folder of its own"
                ) from error
            raise
        if os.fstat(fd).st_mode & stat.S_IWOTH:
            os.close(fd)
            raise InvalidArgumentError(
                f"{self._path} may be written by all, who could feed this engine wrong KV;"
                " chmod o-w it"
            )
        return fd

    @contextmanager
    def _root(self) -> Iterator[int]:
        try:
            fd = self._open_root()
        except InvalidArgumentError as error:  # it was changed since: this engine goes without
            raise OSError(errno.EPERM, str(error)) from error
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _medium(self) -> Iterator[None]:
        """Count what the file system refuses, and leave it alone for a while."""
        try:
            yield
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        _log.debug("folder tier: %s", error)
        with self._lock:
            self._count(errors=1)
            self._problem = reason_of(error)
            self._quiet.failed()

    def _count(self, **more: int) -> None:
        with self._lock:
            now = self._figures
            self._figures = replace(
                now, **{name: getattr(now, name) + count for name, count in more.items()}
            )

    def _at_once(self, call: Callable[[_A], _T], each: Sequence[_A]) -> list[_T]:
        """Call for each, several at once; answers in their order."""
        errors = self._figures.errors
        answers = self._calls.map(call, each) if len(each) > 1 else [call(one) for one in each]
        with self._lock:
            if self._figures.errors == errors:
                self._problem = ""
                self._quiet.worked()
        return answers


def _each(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def _check_limit(limit_bytes: int | None) -> None:
    if limit_bytes is not None and limit_bytes < 0:
        raise InvalidArgumentError(f"a limit of {limit_bytes} bytes; give 0 or more")
