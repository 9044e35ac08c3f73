"""A client connection with an endpoint of its own.

with connect(parse_address("unix:///run/kv"), PROTOCOL) as channel:
    answer = channel.call(Ask(name="kv"), timeout_s=1.0)
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from kvelastic.errors import UnsupportedError
from kvelastic.messages import Address, Connection, Endpoint, Protocol, Request, SecretFile


def connect(
    address: Address,
    protocol: Protocol,
    *,
    secret: SecretFile | None = None,
    timeout_s: float = 5.0,
) -> Channel:
    """Connect to the server at `address`. Raises as `Endpoint.connect` does."""
    with ExitStack() as undo:
        endpoint = undo.enter_context(Endpoint(protocol, _refuse, secret=secret))
        channel = Channel(endpoint, endpoint.connect(address, timeout_s))
        undo.pop_all()
        return channel


def _refuse(request: Request) -> None:
    request.refuse(UnsupportedError("this client answers no questions"))


class Channel:
    """A channel, returned by `connect`; `close()` it, or use it as a context manager."""

    def __init__(self, endpoint: Endpoint, connection: Connection) -> None:
        self.endpoint: Final = endpoint
        self.connection: Final = connection
        self.socket: Final = connection.socket
        self.writer: Final = connection._writer
        self.call: Final = connection.call
        self.call_for_descriptors: Final = connection.call_for_descriptors

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.endpoint.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
