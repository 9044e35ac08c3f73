"""The folder for Unix sockets that only this user can access."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kvelastic.errors import ChannelError

_MODE: Final = 0o700


def runtime_folder(*parts: str) -> Path:
    """Return a folder below XDG_RUNTIME_DIR, or below /tmp/kvelastic-UID; creates it.

    Raises `ChannelError` if it cannot be created or others can write to it.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/kvelastic-{os.geteuid()}")
    folder = base.joinpath(*parts)
    try:
        for one in (base, *(base.joinpath(*parts[: at + 1]) for at in range(len(parts)))):
            one.mkdir(mode=_MODE, exist_ok=True)
            found = one.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not is_ours or stat.S_IMODE(found.st_mode) & 0o022:
                raise ChannelError(
                    f"{one} can be written by others; remove it, or set XDG_RUNTIME_DIR"
                )
    except OSError as error:
        raise ChannelError(
            f"no folder for the sockets of links: {error}; set XDG_RUNTIME_DIR"
        ) from error
    return folder
