"""Conversion of FlexKV's endpoints to socket addresses."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Final

from kvelastic.errors import ConfigError, InvalidArgumentError, UnsupportedError
from kvelastic.messages import MOST_PATH_BYTES, Address, parse_address
from kvelastic.messages.sockets import remove_if_dead

_PREFIX: Final = "flexkv_"
_YOUNG_S: Final = 60.0
_SHORT_FOLDER: Final = Path("/tmp")
GPU_REGISTER: Final = "_gpu_register"
"""FlexKV's suffix of the endpoint at which tensors are registered."""


def socket_address(endpoint: str) -> Address:
    """Convert `ipc:///path`, `unix:///path` or a path to an address.

    Raises `UnsupportedError` for TCP, which cannot transfer memory descriptors, and `ConfigError`
    for anything else.
    """
    if endpoint.startswith("tcp:"):
        raise UnsupportedError(
            f"{endpoint}: memory is handed over a Unix socket of this machine; use ipc:///path, and"
            " one server on each machine"
        )
    path = endpoint.removeprefix("ipc://").removeprefix("unix://")
    try:
        return parse_address(f"unix://{path}")
    except InvalidArgumentError as error:
        raise ConfigError(f"{endpoint!r} is no endpoint; use ipc:///path: {error}") from None


def gpu_register_endpoint(server_recv_port: str) -> str:
    """Return the default endpoint for ranks of the server at that endpoint."""
    return server_recv_port + GPU_REGISTER


def default_folder() -> Path:
    """Return the folder of unnamed endpoints: this user's runtime folder, or the temporary one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime)
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no writable folder
        return _SHORT_FOLDER


def remove_dead_endpoints() -> None:
    """Remove sockets of killed engines in the default folders: those without a listener.

    Sockets younger than a minute stay, because their owners may be about to listen.
    """
    pattern = f"{_PREFIX}{os.geteuid()}_*"
    for path in chain.from_iterable(
        folder.glob(pattern) for folder in {default_folder(), _SHORT_FOLDER}
    ):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _YOUNG_S:
                remove_if_dead(path)


def default_endpoint(name: str = "server") -> str:
    """Return this user's endpoint of that name in the default folder.

    If the path would be too long for a socket, the endpoint is in `/tmp`.
    """
    path = default_folder() / f"{_PREFIX}{os.geteuid()}_{name}"
    is_short = len(os.fsencode(path)) + len(GPU_REGISTER) <= MOST_PATH_BYTES
    return f"ipc://{path if is_short else _SHORT_FOLDER / path.name}"


def unique_endpoint() -> str:
    """Return a default endpoint that no other manager uses."""
    return default_endpoint(f"{os.getpid()}_{secrets.token_hex(4)}")
