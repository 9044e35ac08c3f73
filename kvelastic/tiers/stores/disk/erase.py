"""Erase records in the files of exited engines, whatever their record size.

    done = erase_at_rest(["/mnt/nvme0/kv"], Selection(model="llama"))
    print(done.records, done.busy_files)      # busy files belong to running engines: erase there

A running engine erases its own records and those in its folders that no engine owns. This module is
for an operator whose engine does not run and may never run again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from kvelastic.tiers.base import Selection
from kvelastic.tiers.stores.disk.file import DataFile
from kvelastic.tiers.stores.disk.folder import Folder
from kvelastic.tiers.stores.disk.format import entries
from kvelastic.tiers.stores.record_owner import Wanted, wanted_by


@dataclass
class ErasedAtRest:
    """Counts of records and files that an erasure removed or skipped."""

    records: int = 0
    """Records made unreadable, including damaged ones."""
    busy_files: int = 0
    """Files of running engines, or that other users can access. They were skipped."""
    damaged_files: int = 0
    """Files without a valid header, which were removed."""


def erase_at_rest(folders: Sequence[str | os.PathLike[str]], selection: Selection) -> ErasedAtRest:
    """Make the selected records unreadable in the files of exited engines.

    The owner of damaged records and of files without a valid header is unknown. Every selection
    erases them, and the bytes of displaced records. Blocks until the disk is done. Raises
    `InvalidArgumentError` if other users can access a folder, and `OSError` if the file system
    fails. Records erased before the error stay erased.
    """
    done = ErasedAtRest()
    for path in folders:
        folder = Folder(os.path.abspath(os.fspath(path)))  # noqa: PTH100
        try:
            erase_left_behind(folder, selection, time.time(), done)
        finally:
            folder.close()
    return done


def erase_left_behind(
    folder: Folder, selection: Selection, now_s: float, done: ErasedAtRest
) -> None:
    """Erase as `erase_at_rest` does, in one open folder; add the counts to `done`.

    Takes the folder's lock.
    """
    wanted = wanted_by(selection, now_s)
    with folder.locked():
        whole, others, busy = folder.take_over()
        done.busy_files += busy
        with ExitStack() as ends:
            for file in whole:
                ends.callback(file.close)
            for file in whole:
                done.records += _erase(file, wanted)
        for name in others:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder.fd)
                done.damaged_files += 1
        if others:
            os.fsync(folder.fd)


def _erase(file: DataFile, wanted: Wanted) -> int:
    kept = set()
    erased = []
    for slot, entry in entries(file.read_table(), file.file_id):
        # The owner of a damaged entry is unknown.
        if entry is None or wanted(entry.owner, entry.stored_ns):
            erased.append(slot)
        else:
            kept.add(slot)
    file.clear_entries(erased)
    file.sync()
    others = [slot for slot in range(file.geometry.slots) if slot not in kept]
    try:
        file.release(others)  # wiping would allocate space for slots that have none
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS}:
            raise
        file.wipe(others)
    file.sync()
    return len(erased)
