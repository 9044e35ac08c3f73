"""The folders of the disk tier, as the engines of one machine share them.

::

    <number>.kv      records; its writer holds flock() on it (disk_file.py)
    <number>.live    an engine that runs holds flock() on it. It has no contents: its *length* says
                     how many bytes of room its engine waits for
    .lock            flock() of who takes room, makes or takes over files, or looks at all of it
    .written         what was written today (write_budget.py)

The account is the file system's own: the blocks of all `.kv` files. Nobody has to keep it, and
nobody's death makes it wrong.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from kvelastic.tiers.disk_file import SUFFIX, DataFile, held_bytes
from kvelastic.tiers.owned_files import lock_within, open_file, open_folder

_LIVE_SUFFIX: Final = ".live"
_LOCK: Final = ".lock"
LOCK_WAIT_S: Final = 1.0
"""How long one engine waits for another, which has the lock for as long as room takes to get."""


class FolderBusyError(OSError):
    """Another engine has had the folder's lock all the time."""


class Folder:
    """One folder. The store's lock guards it; raises `OSError` for what the file system says."""

    def __init__(self, path: str) -> None:
        """Open it, make it where it is not there, and say that this engine lives.

        Raises `InvalidArgumentError` for a folder that is not this user's alone.
        """
        self.path = path
        self._live = -1
        self._lock = -1
        self.fd = open_folder(path)
        try:
            self._lock = open_file(self.fd, _LOCK, os.O_RDWR | os.O_CREAT)
            state = os.fstat(self.fd)
            self.identity = (state.st_dev, state.st_ino)
            self._live_name = os.urandom(8).hex() + _LIVE_SUFFIX
            with self.locked():
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                self._live = open_file(self.fd, self._live_name, flags)
                fcntl.flock(self._live, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock; raises `FolderBusyError` after `LOCK_WAIT_S`."""
        if not lock_within(self._lock, LOCK_WAIT_S):
            raise FolderBusyError(f"the lock of {self.path} is held")
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def held_bytes(self) -> int:
        """What all files take, whoever's they are. Under the lock."""
        return sum(held_bytes(state) for state in self._states("").values())

    def record_files(self) -> list[str]:
        """The names of all files with records."""
        return list(self._states(SUFFIX))

    def take_over(self) -> tuple[list[DataFile], list[str]]:
        """Files whose writers are gone: those that are whole, and the names of the others."""
        whole = []
        others = []
        for name in self._states(SUFFIX):
            with suppress(OSError):
                file = DataFile.take_over(self.fd, name)
                if file is not None:
                    whole.append(file)
                elif self._is_free(name):
                    others.append(name)
        return whole, others

    def remove_oldest(self, names: list[str]) -> bool:
        """Remove the one of these that was written longest ago; False where there is none.

        Under the lock. Only files that nobody holds go.
        """
        states = self._states(SUFFIX)
        ages = sorted((states[name].st_mtime_ns, name) for name in names if name in states)
        for _, name in ages:
            with suppress(OSError):
                if self._is_free(name):
                    os.unlink(name, dir_fd=self.fd)
                    return True
        return False

    def engines(self) -> tuple[int, int]:
        """How many engines live here, and how many bytes others of them wait for. Under the lock.

        Removes what dead ones have left.
        """
        count, waited_bytes = 1, 0
        for name, state in self._states(_LIVE_SUFFIX).items():
            if name == self._live_name:
                continue
            if self._is_free(name):
                with suppress(OSError):
                    os.unlink(name, dir_fd=self.fd)
                continue
            count += 1
            waited_bytes += state.st_size
        return count, waited_bytes

    def wait_for(self, wanted_bytes: int) -> None:
        """Say how many bytes this engine waits for; 0: none."""
        if os.fstat(self._live).st_size != wanted_bytes:
            os.ftruncate(self._live, wanted_bytes)

    def is_there(self) -> bool:
        """Whether the path still leads to this folder, and its lock is the one that others see."""
        try:
            seen = Path(self.path).lstat()
            lock = os.stat(_LOCK, dir_fd=self.fd, follow_symlinks=False)
            own = os.fstat(self._lock)
        except OSError:
            return False
        same_lock = (lock.st_dev, lock.st_ino) == (own.st_dev, own.st_ino)
        return same_lock and (seen.st_dev, seen.st_ino) == self.identity

    def close(self) -> None:
        """Say that this engine is gone. Repeatable."""
        if self._live >= 0:
            with suppress(OSError):
                os.unlink(self._live_name, dir_fd=self.fd)
        self.forget()

    def forget(self) -> None:
        """Close the descriptors and leave all files as they are: a forked child's part."""
        for fd in (self._live, self._lock, self.fd):
            if fd >= 0:
                os.close(fd)
        self._live = self._lock = self.fd = -1

    def _states(self, suffix: str) -> dict[str, os.stat_result]:
        found = {}
        with os.scandir(self.fd) as listing:
            for entry in listing:
                if entry.name.endswith(suffix):
                    with suppress(OSError):
                        found[entry.name] = entry.stat(follow_symlinks=False)
        return found

    def _is_free(self, name: str) -> bool:
        """Whether no process holds the file."""
        try:
            fd = open_file(self.fd, name, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


@contextmanager
def all_locked(folders: list[Folder]) -> Iterator[None]:
    """Hold the locks of several folders, in an order that is the same for every engine."""
    with ExitStack() as stack:
        for folder in sorted(folders, key=lambda one: one.identity):
            stack.enter_context(folder.locked())
        yield
