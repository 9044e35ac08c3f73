"""The folders of the disk tier, shared by the engines of one machine.

::

    <number>.kv      records; its writer holds flock() on it (file.py)
    <number>.live    a running engine holds flock() on it. It has no contents: its *length* is
                     the number of bytes of space its engine waits for
    .lock            flock() while allocating space, creating or taking over files, or scanning
    .written         bytes written today (write_budget.py)

The space used is what the file system reports: the blocks of the `.kv` files. No process maintains
an account, so the death of a process cannot make it wrong.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from kvelastic.file_lock import lock_within
from kvelastic.tiers.owned_files import open_file, open_folder
from kvelastic.tiers.stores.disk.file import SUFFIX, DataFile, held_bytes

_LIVE_SUFFIX: Final = ".live"
_LOCK: Final = ".lock"
LOCK_WAIT_S: Final = 1.0
"""How long an engine waits for the lock. Another engine holds it while it allocates space."""


class FolderBusyError(OSError):
    """Another engine held the folder's lock for the whole wait."""


class Folder:
    """One folder. The store's lock guards it. Methods raise `OSError` if the file system fails."""

    def __init__(self, path: str) -> None:
        """Open the folder, create it if missing, and register this engine as live.

        Raises `InvalidArgumentError` if other users can access the folder.
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
        """Return the bytes all files take, including other engines' files.

        The caller holds the lock.
        """
        return sum(held_bytes(state) for state in self._states("").values())

    def take_over(self) -> tuple[list[DataFile], list[str], int]:
        """Take over files of exited writers.

        Return the valid files, the names of invalid ones, and the number of files left alone.
        """
        whole = []
        others = []
        names = self._states(SUFFIX)
        for name in names:
            with suppress(OSError):
                file = DataFile.take_over(self.fd, name)
                if file is not None:
                    whole.append(file)
                elif self._is_free(name):
                    others.append(name)
        return whole, others, len(names) - len(whole) - len(others)

    def remove_oldest(self, names: list[str]) -> bool:
        """Remove the least recently written file in `names`; return whether one was removed.

        The caller holds the lock. Files that a process holds are kept.
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
        """Return the number of live engines and the bytes that the others wait for.

        Removes the `.live` files of dead engines. The caller holds the lock.
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
        """Publish how many bytes of space this engine waits for; 0 for none."""
        if os.fstat(self._live).st_size != wanted_bytes:
            os.ftruncate(self._live, wanted_bytes)

    def is_there(self) -> bool:
        """Whether the path still leads to this folder, with the `.lock` that this engine opened."""
        try:
            seen = Path(self.path).lstat()
            lock = os.stat(_LOCK, dir_fd=self.fd, follow_symlinks=False)
            own = os.fstat(self._lock)
        except OSError:
            return False
        same_lock = (lock.st_dev, lock.st_ino) == (own.st_dev, own.st_ino)
        return same_lock and (seen.st_dev, seen.st_ino) == self.identity

    def close(self) -> None:
        """Unregister this engine and close the folder. Idempotent."""
        if self._live >= 0:
            with suppress(OSError):
                os.unlink(self._live_name, dir_fd=self.fd)
        self.forget()

    def forget(self) -> None:
        """Close the descriptors and keep all files. For a forked child."""
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
            return lock_within(fd, 0.0)
        except OSError:
            return False
        finally:
            os.close(fd)


@contextmanager
def all_locked(folders: list[Folder]) -> Iterator[None]:
    """Hold the locks of several folders. Every engine takes them in the same order."""
    with ExitStack() as stack:
        for folder in sorted(folders, key=lambda one: one.identity):
            stack.enter_context(folder.locked())
        yield
