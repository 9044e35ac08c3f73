"""The folders of tiers: which are refused, and whether one could be used.

    why_unusable("disk", "/var/kv")     # "Permission denied: /var/kv", or "" if it can be used

Stores check a folder with the same functions when they open it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
NO_FOLDER: Final = frozenset((errno.ELOOP, errno.ENOTDIR, errno.EEXIST))
"""Errors of opening or creating a path that is a link or not a folder."""
_OTHERS: Final = 0o077
_LEAST_BYTES: Final = 4096


def no_folder(name: str) -> str:
    """Return the refusal of a path with an error of `NO_FOLDER`."""
    return f"{name} is a link or no folder; give a folder of its own"


def fault_of_own(name: str, state: os.stat_result) -> str:
    """Return why a folder is refused that must belong to this user alone; empty if it is not."""
    problem = ""
    if state.st_uid != os.geteuid():
        problem = f"belongs to user {state.st_uid}; give a folder of user {os.geteuid()}"
    elif stat.S_IMODE(state.st_mode) & _OTHERS:
        problem = "is open to others; chmod 700 it, or give a folder of its own"
    return f"{name} {problem}: what lies there is prompts" if problem else ""


def fault_of_shared(name: str, state: os.stat_result) -> str:
    """Return why a folder is refused that machines share; empty if it is not."""
    if state.st_mode & stat.S_IWOTH:
        return f"{name} may be written by all, who could feed this engine wrong KV; chmod o-w it"
    return ""


def reason_of(error: OSError) -> str:
    """Return the text of an error for an operator, such as `Permission denied: /mnt/kv`."""
    if not error.strerror:
        return str(error)
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror


def why_unusable(kind: str, folder: str) -> str:
    """Return why a tier of this kind (disk or folder) cannot use the folder; empty if it can.

    Writes one file without a name to an existing folder, and creates no folder. Blocks on the file
    system.
    """
    try:
        fd = os.open(folder, FOLDER_FLAGS)
    except FileNotFoundError:
        return _why_not_created(Path(folder))
    except OSError as error:
        return no_folder(folder) if error.errno in NO_FOLDER else reason_of(error)
    try:
        state = os.fstat(fd)
    finally:
        os.close(fd)
    fault = fault_of_own(folder, state) if kind == "disk" else fault_of_shared(folder, state)
    if fault:
        return fault
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(_LEAST_BYTES))
            file.flush()
    except OSError as error:
        return f"{error.strerror or error}: {folder}"
    return ""


def _why_not_created(folder: Path) -> str:
    parent = next(each for each in folder.parents if os.path.lexists(each))
    if not parent.is_dir():
        return f"{folder} cannot be created: {parent} is no folder"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{folder} cannot be created: {parent} is not writable for user {os.geteuid()}"
    return ""
