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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvelastic.tiers.base import Selection
from kvelastic.tiers.disk_file import DataFile
from kvelastic.tiers.disk_folder import Folder
from kvelastic.tiers.disk_format import entries
from kvelastic.tiers.record_owner import Owner, model_hash


@dataclass(frozen=True)
class ErasedAtRest:
    """What came of it."""

    records: int = 0
    """Records that cannot be read from the files any more."""
    busy_files: int = 0
    """Files of engines that run, where nothing was looked at."""

    def __add__(self, other: ErasedAtRest) -> ErasedAtRest:
        return ErasedAtRest(self.records + other.records, self.busy_files + other.busy_files)


Wanted = Callable[[Owner, int], bool]
"""Whether a record of this owner, stored at that time (ns since the epoch), is to go."""


def wanted_by(selection: Selection, now_s: float) -> Wanted:
    """What a selection says of records."""
    namespace = None if selection.namespace is None else selection.namespace.fingerprint
    model = None if selection.model is None else model_hash(selection.model)
    older_than_s = selection.older_than_s
    before_ns = None if older_than_s is None else int((now_s - older_than_s) * 1e9)

    def wanted(owner: Owner, stored_ns: int) -> bool:
        return (
            (namespace is None or owner.namespace == namespace)
            and (model is None or owner.model == model)
            and (before_ns is None or stored_ns < before_ns)
        )

    return wanted


def erase_at_rest(folders: Sequence[str | os.PathLike[str]], selection: Selection) -> ErasedAtRest:
    """Make records unreadable in the files of engines that are gone.

    With a selection that restricts nothing, files that are not whole go as well. Blocks as long as
    the medium takes. Raises `InvalidArgumentError` for a folder that is not this user's alone, and
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
        if selection == Selection():
            for name in others:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder.fd)
    return done + ErasedAtRest(busy_files=busy)


def _erase(file: DataFile, wanted: Wanted) -> int:
    slots = []
    for slot, entry in entries(file.read_table(), file.file_id):
        # Of an entry that is not whole nobody knows whose record it was.
        if entry is None or wanted(
            Owner(entry.namespace, entry.model, entry.generation), entry.stored_ns
        ):
            slots.append(slot)
    for slot in slots:
        file.clear_entry(slot)
    if slots:
        file.sync()
        try:
            file.release(slots)  # to wipe would take room for those that have none
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS}:
                raise
            file.wipe(slots)
        file.sync()
    return len(slots)
