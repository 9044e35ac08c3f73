"""A cache of SHA-256 digests of files, in a file that only this user can write.

    cache = HashCache(default_path())
    cache.get({path: facts})         # 64 hex digits by path; without files that changed since
    cache.put(path, facts, digest)

An entry is valid while the size, mtime, ctime and inode of the file stay the same. The kernel sets
ctime on every change, and no call can restore it. So a changed file is read again, even if its
mtime was restored. A digest is not cached if the file changed in the last two seconds before it was
read: a second change within one tick of the file system's clock would be invisible.

A cache that cannot be read or written acts as an empty one. Safe for concurrent use by threads and
processes. Each call reads or replaces the whole file, which takes milliseconds at the maximum of
4,096 entries.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvelastic.errors import InvalidArgumentError
from kvelastic.file_lock import lock_within
from kvelastic.logs import log_once
from kvelastic.tiers.owned_files import open_file, open_folder

FILE_NAME: Final = "weights.json"
_LOCK: Final = "weights.lock"
_LOCK_WAIT_S: Final = 1.0
_VERSION: Final = 1
_MOST_BYTES: Final = 8 << 20
_MOST_ENTRIES: Final = 4096
_SETTLED_NS: Final = 2_000_000_000
"""The coarsest timestamp resolution of a file system in use: FAT's."""


class FileFacts(NamedTuple):
    """File metadata that changes whenever the file changes."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @staticmethod
    def of(state: os.stat_result) -> FileFacts:
        """Return the facts from a `stat` result."""
        return FileFacts(state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)

    def is_settled(self, now_ns: int) -> bool:
        """Return whether a change after `now_ns` would be visible in the facts."""
        return max(self.mtime_ns, self.ctime_ns) < now_ns - _SETTLED_NS


def default_folder() -> Path | None:
    """Return `$XDG_CACHE_HOME/kvelastic` or `~/.cache/kvelastic`. None if the user has no home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # noqa: PTH117  (the specification ignores any other)
        return Path(named) / "kvelastic"
    try:
        return Path.home() / ".cache" / "kvelastic"
    except RuntimeError:
        return None


class HashCache:
    """Cached digests of files. Thread-safe."""

    def __init__(self, folder: Path | None) -> None:
        """Uses the cache in `folder`, which `put` creates. None: no cache."""
        self._folder = folder

    def get(self, files: dict[str, FileFacts]) -> dict[str, str]:
        """Return the cached digests, by path."""
        folder = self._open(make=False)
        if folder is None:
            return {}
        try:
            entries = _read(folder)
        finally:
            os.close(folder)
        return {
            path: entries[path][1]
            for path, facts in files.items()
            if path in entries and entries[path][0] == facts
        }

    def put(self, path: str, facts: FileFacts, digest: str) -> None:
        """Cache a digest. Blocks for at most 1 s while another process stores one.

        After that, does not store it.
        """
        folder = self._open(make=True)
        if folder is None:
            return
        try:
            _add(folder, path, facts, digest)
        except OSError as error:
            self._warn(error)
        finally:
            os.close(folder)

    def _open(self, *, make: bool) -> int | None:
        # `Path.is_dir` raises if the user may not enter a parent folder.
        if self._folder is None or not (make or os.path.isdir(self._folder)):  # noqa: PTH112
            return None
        try:
            return open_folder(self._folder)
        except (OSError, InvalidArgumentError) as error:
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        log_once(
            logging.WARNING,
            f"The hashes of weights cannot be kept in {self._folder}, so they are computed at each"
            f" start: {error}. Give this user a folder of its own by XDG_CACHE_HOME.",
        )


_Entries = dict[str, tuple[FileFacts, str]]


def _read(folder: int) -> _Entries:
    """Return the entries of the cache file. Empty if the file is missing or invalid."""
    try:
        fd = open_file(folder, FILE_NAME, os.O_RDONLY)
        with os.fdopen(fd, "rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            return {}
        content = json.loads(raw)
        if content["version"] != _VERSION:
            return {}
        return {
            path: (FileFacts(*map(int, facts)), bytes.fromhex(digest).hex())
            for path, (*facts, digest) in content["files"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _add(folder: int, path: str, facts: FileFacts, digest: str) -> None:
    lock = open_file(folder, _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        if not lock_within(lock, _LOCK_WAIT_S):
            return
        entries = _read(folder)
        entries.pop(path, None)
        entries[path] = (facts, digest)
        latest = list(entries.items())[-_MOST_ENTRIES:]
        files = {name: [*of, known] for name, (of, known) in latest}
        _replace(folder, json.dumps({"version": _VERSION, "files": files}).encode())
    finally:
        os.close(lock)


def _replace(folder: int, raw: bytes) -> None:
    name = f"{FILE_NAME}.new"  # the lock is held; a process that died may have left this file
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    fd = open_file(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(fd, "wb") as opened:
        opened.write(raw)
    os.replace(name, FILE_NAME, src_dir_fd=folder, dst_dir_fd=folder)
