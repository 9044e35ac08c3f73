"""Files that a configuration names: what is wrong with them before anything is done with them.

Blocks, for a moment: no file is opened that could block, a FIFO for one.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvelastic.controller.settings import ServerSettings, Settings

_NULL_DEVICE: Final = "/dev/null"


def faults_of_files(settings: Settings) -> list[str]:
    """One sentence each, with the key that names the file and what to do."""
    faults = list(_of_tls(settings.server))
    for number, model in enumerate(settings.models):
        path = None if model.launch is None else model.launch.log_file
        if path is not None:
            faults += [f"models.{number}.launch.log_file: {why}" for why in fault_of_log(path)]
    return faults


def fault_of_log(path: str) -> Iterator[str]:
    """Why an engine's output cannot be appended to what is there now; nothing: it can."""
    with suppress(OSError):  # it is made at the start, which says what is in the way
        state = Path(path).lstat()
        if stat.S_ISLNK(state.st_mode):
            yield f"{path} is a symbolic link, which is not followed; name the file itself"
        elif not is_log(state):
            yield f"{path} is {_kind_of(state)}; name a regular file, or {_NULL_DEVICE}"


def is_log(state: os.stat_result) -> bool:
    """Whether an engine's output may go there: no reader, terminal or device can block it."""
    if stat.S_ISCHR(state.st_mode):
        return state.st_rdev == Path(_NULL_DEVICE).stat().st_rdev
    return stat.S_ISREG(state.st_mode)


def _of_tls(server: ServerSettings) -> Iterator[str]:
    certificate, key = server.tls_cert, server.tls_key
    if certificate is None or key is None:
        return
    count = 0
    for name, path in (("tls_cert", certificate), ("tls_key", key)):
        for why in _not_readable(path):
            count += 1
            yield f"server.{name}: {why}"
    if count:
        return
    try:
        # The controller has no terminal to ask for a password at, and OpenSSL would wait there.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certificate, key, password=lambda: ""
        )
    except (OSError, ValueError) as error:
        yield (
            f"server.tls_cert, server.tls_key: {certificate} and {key} are no certificate and its"
            f" unencrypted key in PEM ({error})"
        )


def _not_readable(path: str) -> Iterator[str]:
    try:
        state = Path(path).stat()
        if not stat.S_ISREG(state.st_mode):
            yield f"{path} is {_kind_of(state)}; name a regular file"
            return
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        yield f"cannot read {path}: {error.strerror}"


def _kind_of(state: os.stat_result) -> str:
    kinds = (
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for is_kind, name in kinds if is_kind(state.st_mode)), "no regular file")
