"""Erase from a folder store: selected records, and records whose owner is unknown.

    removed, problems = erase(root, wanted_by(selection, time.time()))

A damaged record may belong to any owner, so every selection removes it. A record that is being
written, or was abandoned half written, is matched by its entry. If its file is removed, the writer
stores nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from kvelastic.tiers.stores.folder import format as folder_format
from kvelastic.tiers.stores.record_owner import Wanted

_NOT_OURS = {errno.ENOTDIR, errno.ELOOP, errno.ENOENT}
"""A file or a link instead of a folder, or a name that was removed during the scan."""


def erase(root: int, wanted: Wanted) -> tuple[int, list[OSError]]:
    """Remove matching files; return how many, and the errors of the file system.

    Reads the entry of every file. Blocks until the file system is done.
    """
    removed = 0
    problems: list[OSError] = []
    for shard in folder_format.shards(root):
        with _noting(problems), folder_format.opened_shard(root, shard) as fd:
            here = removed
            for name in os.listdir(fd):  # noqa: PTH208  (a descriptor)
                with _noting(problems):
                    if folder_format.is_ours(shard, name) and _is_wanted(fd, name, wanted):
                        os.unlink(name, dir_fd=fd)
                        removed += 1
            if removed > here:
                os.fsync(fd)
    return removed, problems


@contextmanager
def _noting(problems: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_OURS:
            problems.append(error)


def _is_wanted(shard_fd: int, name: str, wanted: Wanted) -> bool:
    with folder_format.opened(shard_fd, name) as fd:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            return False
        if state.st_size == 0 and folder_format.is_new(name):
            return False  # just created or abandoned: it has no bytes
        entry = folder_format.read_entry(fd, name)
    return entry is None or wanted(entry.owner, entry.stored_ns)
