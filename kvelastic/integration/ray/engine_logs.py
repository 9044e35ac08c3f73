"""The files with the output of replicas' engines, one for each replica.

They are in `ray` below the folder of launched engines. A replica that ends without a problem
removes its file. The others stay for the operator, and each start removes the oldest ones.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from kvelastic.controller.launch import launch_record

KEPT: Final = 16
"""Number of files that are kept of replicas that have ended."""
SOURCE: Final = "ray:"
"""Start of the source in a replica's launch record; its instance's name follows."""


def path_of(instance: str) -> Path:
    """Return the file of a replica's engine."""
    return _folder() / f"{instance}.log"


def remove_oldest() -> None:
    """Remove all but the newest `KEPT` files of replicas that have ended. Blocks for milliseconds.

    Raises `ControllerError` if other users can write to the folder.
    """
    launch_record.make_folder()
    running = {engine.mark.source for engine in launch_record.find_engines()}
    ended = []
    for path in _folder().glob("*.log"):
        if SOURCE + path.stem not in running:
            with suppress(FileNotFoundError):  # another replica has removed it
                ended.append((path.lstat().st_mtime_ns, path))
    for _, path in sorted(ended, reverse=True)[KEPT:]:
        path.unlink(missing_ok=True)


def _folder() -> Path:
    return launch_record.folder() / "ray"
