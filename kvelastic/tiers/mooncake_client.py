"""The few calls of Mooncake's client that are used, and how one is connected.

Its own classes appear nowhere else, so tests put their own client in place. What its numbers mean
was looked up in 0.3.13: a size or 0 is success, below 0 is a failure.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from typing import Protocol

from kvelastic.errors import DriverError, InvalidArgumentError, UnsupportedError

NOT_FOUND = -704
"""OBJECT_NOT_FOUND."""
NO_ROOM = -200
"""NO_AVAILABLE_HANDLE: every segment is full, and what lies there may not go yet."""
PROBE_S = 1.0
"""How long a master may take to accept a connection."""


class Client(Protocol):
    """`mooncake.store.MooncakeDistributedStore`, as far as it is used."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """0: `size` bytes at that address may be read and written by transfers."""

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """The end of that."""

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1: there; 0: not there; below 0: an error."""

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """0: stored, or there already; below 0: an error."""

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Bytes read; below 0: an error."""

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]:
        """0: removed; below 0: an error. `force`: also what somebody has looked up just now."""

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int:
        """How many were removed; below 0: an error."""

    def close(self) -> int:
        """Leave the cluster; what this client's memory holds is gone."""


def check_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises `InvalidArgumentError` for anything else."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", address)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        raise InvalidArgumentError(
            f"{address!r} is no address of a Mooncake master; give host:port, e.g. 10.0.0.1:50051"
        )
    return found[1] or found[2], int(found[3])


def require_library() -> None:
    """Raises `UnsupportedError` that says how to install it, where it cannot be imported."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"Mooncake's client cannot be imported ({error}). Install it with"
            " `pip install 'kvelastic[remote]'`; it also needs the system library libibverbs"
            " (Debian: libibverbs1)"
        ) from error


def connect(address: str, segment_bytes: int, buffer_bytes: int) -> Client:
    """A client of the master at `address` that gives `segment_bytes` of memory to the cluster.

    Blocks, where the master accepts and does not answer for a minute and a half. Raises `OSError`
    where nobody accepts, `DriverError` where the client cannot be set up.
    """
    from mooncake.store import MooncakeDistributedStore

    host, port = check_address(address)
    # The client itself tries twenty times before it says that nobody is there.
    with socket.create_connection((host, port), PROBE_S) as probe:
        own_host = str(probe.getsockname()[0])
    client = MooncakeDistributedStore()
    code = client.setup(
        own_host, "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", f"{host}:{port}"
    )
    if code != 0:
        raise DriverError(f"Mooncake's client cannot be set up for {address}: its code is {code}")
    return client  # type: ignore[no-any-return]
