"""Checks the files and programs that a configuration names, before they are used.

The checks block only briefly: they open no file that could block, such as a FIFO.
"""

from __future__ import annotations

import os
import shutil
import ssl
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvelastic.controller.settings.settings import ServerSettings, Settings

_NULL_DEVICE: Final = "/dev/null"


def faults_of_files(settings: Settings) -> list[str]:
    """Return one sentence per fault, with the key that names the file and the remedy."""
    faults = list(_of_tls(settings.server))
    for number, model in enumerate(settings.models):
        path = None if model.launch is None else model.launch.log_file
        if path is not None:
            faults += [f"models.{number}.launch.log_file: {why}" for why in fault_of_log(path)]
    return faults


def programs_not_found(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Return one sentence per model whose `launch.command` cannot be run on this machine now.

    `environ` is the controller's; its engines inherit the PATH.
    """
    found = []
    for model in settings.models:
        launch = model.launch
        if launch is None:
            continue
        path = launch.env.get("PATH", environ.get("PATH", os.defpath))
        program, folder = launch.command[0], launch.cwd or ""
        if os.sep in program:
            program = os.path.join(folder, program)  # noqa: PTH118
        if folder and not Path(folder).is_dir():
            found.append(f"model {model.name!r}: launch.cwd {folder} is not a folder")
        elif shutil.which(program, path=path) is None:
            found.append(
                f"model {model.name!r}: launch.command: the program {launch.command[0]!r} is not"
                " there, or cannot be executed; install it, or write its whole path"
            )
    return found


def fault_of_log(path: str) -> Iterator[str]:
    """Yield why an engine's output cannot be appended to `path`; nothing if it can."""
    with suppress(OSError):  # a missing file is created at the start, which reports errors
        state = Path(path).lstat()
        if stat.S_ISLNK(state.st_mode):
            yield f"{path} is a symbolic link, which is not followed; name the file itself"
        elif not is_log(state):
            yield f"{path} is {_kind_of(state)}; name a regular file, or {_NULL_DEVICE}"


def is_log(state: os.stat_result) -> bool:
    """Return True for a regular file and the null device: writing to other files may block."""
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
        # The controller has no terminal, and OpenSSL would wait there for a password.
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
