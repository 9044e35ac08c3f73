"""Erasing from the files of engines that are gone, whatever the size of their records.

    done = erase_at_rest(["/mnt/nvme0/kv"], Selection(model="llama"))
    print(done.records, done.busy_files)      # files of engines that run: ask these to erase

An engine erases what is its own, and what lies in its folders and is nobody's. This is for an
operator whose engine does not run, or will never run again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvelastic.tiers.base import Selection
from kvelastic.tiers.disk_file import DataFile
from kvelastic.tiers.disk_folder import Folder
from kvelastic.tiers.disk_format import entries
from kvelastic.tiers.record_owner import Owner, Wanted, wanted_by


@dataclass(frozen=True)
class ErasedAtRest:
    """What an erasure has removed, and what it has not looked at."""

    records: int = 0
    """Records that cannot be read from the files any more; damaged ones count, too."""
    busy_files: int = 0
    """Files of engines that run, or that are not this user's alone: nothing was looked at."""
    damaged_files: int = 0
    """Files without a whole header, which were removed."""

    def __add__(self, other: ErasedAtRest) -> ErasedAtRest:
        return ErasedAtRest(
            self.records + other.records,
            self.busy_files + other.busy_files,
            self.damaged_files + other.damaged_files,
        )


def erase_at_rest(folders: Sequence[str | os.PathLike[str]], selection: Selection) -> ErasedAtRest:
    """Make records unreadable in the files of engines that are gone.

    It is not known whose damaged records were, and what lies in files that are not whole: they go
    with every selection, and so do the bytes of displaced records. Blocks as long as the medium
    takes. Raises `InvalidArgumentError` for a folder that is not this user's alone, and
    `OSError` for what the file system says: what was erased until then is erased.
    """
    done = ErasedAtRest()
    for path in folders:
        folder = Folder(os.path.abspath(os.fspath(path)))  # noqa: PTH100
        try:
            done += erase_left_behind(folder, selection, time.time())
        finally:
            folder.close()
    return done


def erase_left_behind(folder: Folder, selection: Selection, now_s: float) -> ErasedAtRest:
    """The same in one folder that is open; takes its lock."""
    wanted = wanted_by(selection, now_s)
    done = ErasedAtRest()
    with folder.locked():
        whole, others = folder.take_over()
        busy = len(folder.record_files()) - len(whole) - len(others)
        for file in whole:
            try:
                done += ErasedAtRest(_erase(file, wanted))
            finally:
                file.close()
        for name in others:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder.fd)
                done += ErasedAtRest(damaged_files=1)
        if others:
            os.fsync(folder.fd)
    return done + ErasedAtRest(busy_files=busy)


def _erase(file: DataFile, wanted: Wanted) -> int:
    kept = set()
    erased = []
    for slot, entry in entries(file.read_table(), file.file_id):
        # Of an entry that is not whole it is not known whose record it was.
        if entry is None or wanted(
            Owner(entry.namespace, entry.model, entry.generation), entry.stored_ns
        ):
            erased.append(slot)
        else:
            kept.add(slot)
    file.clear_entries(erased)
    file.sync()
    others = [slot for slot in range(file.geometry.slots) if slot not in kept]
    try:
        file.release(others)  # to wipe would take room for those that have none
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS}:
            raise
        file.wipe(others)
    file.sync()
    return len(erased)
