"""The calls of Mooncake's client that kvelastic uses, and how to connect one.

No other module uses Mooncake's classes, so tests can substitute a fake client. The result codes are
those of version 0.3.13: a size or 0 is success, a negative number is an error.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from typing import Protocol

from kvelastic.errors import DriverError, InvalidArgumentError, UnsupportedError

NOT_FOUND = -704
"""Mooncake's OBJECT_NOT_FOUND."""
NO_ROOM = -200
"""Mooncake's NO_AVAILABLE_HANDLE: every segment is full, and no object can be evicted yet."""
PROBE_S = 1.0
"""How long a master may take to accept a connection."""


class Client(Protocol):
    """The part of `mooncake.store.MooncakeDistributedStore` that is used."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Allow transfers to read and write `size` bytes at the address. Returns 0 on success."""

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """For each key, return 1 if it is stored, 0 if not, negative on error."""

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Store objects. For each key, return 0 if it is stored now or was, negative on error."""

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Read objects. For each key, return the bytes read, negative on error."""

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]:
        """Remove objects. For each key, return 0 if removed, negative on error.

        `force` also removes objects that a client has looked up recently.
        """

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int:
        """Remove the objects whose key matches. Returns how many, or negative on error."""

    def close(self) -> int:
        """Leave the cluster. Objects in this client's memory are lost."""


def check_address(address: str) -> tuple[str, int]:
    """Split `host:port` into host and port. Raises `InvalidArgumentError` if it is invalid."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", address)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        raise InvalidArgumentError(
            f"{address!r} is no address of a Mooncake master; give host:port, e.g. 10.0.0.1:50051"
        )
    return found[1] or found[2], int(found[3])


def require_library() -> None:
    """Raises `UnsupportedError`, with instructions, if the client library cannot be imported."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"Mooncake's client cannot be imported ({error}). Install it with"
            " `pip install 'kvelastic[remote]'`; it also needs the system library libibverbs"
            " (Debian: libibverbs1)"
        ) from error


def connect(address: str, segment_bytes: int, buffer_bytes: int) -> Client:
    """Connect a client to the master at `address`.

    The client contributes `segment_bytes` of memory to the cluster. Blocks, for about 90 s if the
    master accepts the connection but does not reply. Raises `OSError` if the connection is refused
    or takes longer than `PROBE_S`, and `DriverError` if the client cannot be set up.
    """
    from mooncake.store import MooncakeDistributedStore

    host, port = check_address(address)
    # Probe the master first: the client itself retries 20 times before it reports a failure.
    with socket.create_connection((host, port), PROBE_S) as probe:
        own_host = str(probe.getsockname()[0])
    client = MooncakeDistributedStore()
    code = client.setup(
        own_host, "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", f"{host}:{port}"
    )
    if code != 0:
        raise DriverError(f"Mooncake's client cannot be set up for {address}: its code is {code}")
    return client  # type: ignore[no-any-return]
