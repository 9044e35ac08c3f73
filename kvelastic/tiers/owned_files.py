"""Creates and opens folders and files, and checks that only this user can access them.

Opening a name never follows a symbolic link. The checks use the open descriptor, so no process can
replace the file between check and use.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Final

from kvelastic.errors import InvalidArgumentError
from kvelastic.tier_list import FOLDER_FLAGS, NO_FOLDER, fault_of_own, no_folder

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OTHERS: Final = 0o077


def open_folder(
    path: str | os.PathLike[str],
    fault_of: Callable[[str, os.stat_result], str] = fault_of_own,
) -> int:
    """Create the folder if it is missing, open it and return its descriptor.

    Raises `InvalidArgumentError` if the path is a symbolic link or not a folder, or if `fault_of`
    returns why it is refused: by default if it is not of this user alone. Raises `OSError` for
    other errors of the file system.
    """
    name = os.fspath(path)
    try:
        os.makedirs(name, FOLDER_MODE, exist_ok=True)  # noqa: PTH103  (raises EEXIST for a link)
        fd = os.open(name, FOLDER_FLAGS)
    except OSError as error:
        if error.errno in NO_FOLDER:
            raise InvalidArgumentError(no_folder(name)) from error
        raise
    fault = fault_of(name, os.fstat(fd))
    if fault:
        os.close(fd)
        raise InvalidArgumentError(fault)
    return fd


def open_file(folder: int, name: str, flags: int) -> int:
    """Open a file in `folder` (a descriptor) and return its descriptor.

    `flags` are those of `open(2)`. Raises `OSError` if opening fails. Raises `PermissionError` with
    EPERM unless the file is regular, belongs to this user, has only one hard link and is not
    accessible to other users.
    """
    fd = os.open(name, flags | _FLAGS, FILE_MODE, dir_fd=folder)
    state = os.fstat(fd)
    if (
        not stat.S_ISREG(state.st_mode)
        or state.st_uid != os.geteuid()
        or state.st_nlink > 1
        or stat.S_IMODE(state.st_mode) & _OTHERS
    ):
        os.close(fd)
        raise PermissionError(errno.EPERM, "not a file of this user alone", name)
    return fd
