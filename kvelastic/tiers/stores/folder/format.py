"""One file per record, in a folder that other machines write: atomic writes, bounded reads.

::

    ab/abcdef...        the record of that key: an entry of 128 bytes, and its bytes
    ab/.new-...         a record that is being written

Names are never followed as links. The contents of a file count only after its checksum matches.
Functions raise `OSError` if the file system fails.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Final

from kvelastic import _vmm
from kvelastic.tiers.base import KEY_BYTES, NO_KEY
from kvelastic.tiers.stores.disk.format import ENTRY_BYTES, Entry, pack_entry, unpack_entry
from kvelastic.tiers.stores.record_owner import Owner

HEAD_BYTES: Final = ENTRY_BYTES
"""Bytes of a file in front of its record."""
_NEW: Final = ".new-"
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def is_there(root: int, key: bytes, record_bytes: int) -> bool:
    """Whether there is a file of the right size."""
    name = key.hex()
    try:
        state = os.stat(f"{name[:2]}/{name}", dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(state.st_mode) and state.st_size == HEAD_BYTES + record_bytes


def write(root: int, key: bytes, record: memoryview, owner: Owner, stored_ns: int) -> None:
    """Write a record atomically: readers see the whole file or none."""
    checksum = _vmm.record_checksum(record, key)
    entry = Entry(key, NO_KEY, owner, record.nbytes, stored_ns, checksum, 0)
    name = f"{_NEW}{os.urandom(8).hex()}"
    with suppress(FileExistsError):
        os.mkdir(key.hex()[:2], 0o700, dir_fd=root)
    with opened_shard(root, key.hex()[:2]) as shard:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=shard)
        try:
            try:
                _write_all(fd, [memoryview(pack_entry(entry, key, 0)), record.cast("B")])
            finally:
                os.close(fd)  # a network file system reports write errors here
            os.rename(name, key.hex(), src_dir_fd=shard, dst_dir_fd=shard)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=shard)
            raise


def read(root: int, key: bytes, view: memoryview) -> bool:
    """Read a record; return whether it is complete.

    Raises FileNotFoundError if there is no file.
    """
    with _opened(root, key.hex()) as fd:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode) or state.st_size != HEAD_BYTES + view.nbytes:
            return False
        head = bytearray(HEAD_BYTES)
        parts = [memoryview(head), view.cast("B")]
        while parts:
            got = os.readv(fd, parts)
            if got == 0:
                return False
            parts = _after(parts, got)
    entry = unpack_entry(bytes(head), key, 0)
    return (
        entry is not None
        and (entry.key, entry.length_bytes) == (key, view.nbytes)
        and entry.checksum == _vmm.record_checksum(view, key)
    )


def head(root: int, name: str) -> Entry | None:
    """Return the entry of a file; None if it is damaged or unreadable."""
    try:
        with _opened(root, name) as fd:
            return read_entry(fd, name)
    except OSError:
        return None


def read_entry(fd: int, name: str) -> Entry | None:
    """Return the entry of an open file with this name; None if it is damaged."""
    raw = os.read(fd, HEAD_BYTES)
    if len(raw) != HEAD_BYTES:
        return None
    # A file being written has a temporary name, but its entry begins with the key.
    return unpack_entry(raw, raw[:KEY_BYTES] if is_new(name) else bytes.fromhex(name), 0)


def remove(root: int, name: str) -> bool:
    """Remove a file; return whether it was there."""
    try:
        os.unlink(f"{name[:2]}/{name}", dir_fd=root)
    except FileNotFoundError:
        return False
    return True


def files(root: int, abandoned_before_s: float) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every record file, whatever its size, and remove temporary files from before that time.

    Skips what cannot be accessed.
    """
    for shard in shards(root):
        with suppress(OSError), opened_shard(root, shard) as fd:
            for name in os.listdir(fd):  # noqa: PTH208  (a descriptor)
                with suppress(OSError):
                    state = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if not is_ours(shard, name):
                        continue
                    if not is_new(name) and stat.S_ISREG(state.st_mode):
                        yield name, state
                    elif is_new(name) and state.st_mtime < abandoned_before_s:
                        os.unlink(name, dir_fd=fd)


def shards(root: int) -> list[str]:
    """Return the names of the subfolders with record files."""
    return [name for name in os.listdir(root) if len(name) == 2]


def is_ours(shard: str, name: str) -> bool:
    """Whether a file of this name in a shard is a record, complete or being written."""
    return is_new(name) or (_is_key(name) and name[:2] == shard)


def is_new(name: str) -> bool:
    """Whether the name is a temporary one: the file is being written, or was abandoned."""
    return name.startswith(_NEW)


@contextmanager
def _opened(root: int, name: str) -> Iterator[int]:
    with opened_shard(root, name[:2]) as shard, opened(shard, name) as fd:
        yield fd


@contextmanager
def opened(folder: int, name: str, flags: int = 0) -> Iterator[int]:
    """Open a file in an open folder for reading; yields the descriptor."""
    fd = os.open(name, os.O_RDONLY | flags | _FLAGS, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def opened_shard(root: int, name: str) -> AbstractContextManager[int]:
    """Open a shard's folder; yields the descriptor."""
    return opened(root, name, os.O_DIRECTORY)


def _write_all(fd: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _after(parts, os.writev(fd, parts))


def _after(parts: list[memoryview], moved: int) -> list[memoryview]:
    """Return the rest of `parts` after the first `moved` bytes."""
    left = []
    for part in parts:
        if moved < part.nbytes:
            left.append(part[moved:])
        moved = max(0, moved - part.nbytes)
    return left


def _is_key(name: str) -> bool:
    return len(name) == 2 * KEY_BYTES and all(c in "0123456789abcdef" for c in name)
