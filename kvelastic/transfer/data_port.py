"""The TCP port for data streams. Each stream starts with a token that this side expects.

A connection stays unauthenticated until it has sent all 32 bytes of an expected token. It has one
second for that.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from kvelastic.closing import Closing
from kvelastic.errors import (
    AccessDeniedError,
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    TransferError,
)
from kvelastic.messages import Address, Connection
from kvelastic.messages.newcomers import Door, Newcomer
from kvelastic.messages.sockets import ListeningSocket
from kvelastic.transfer.wire import TOKEN_BYTES

_TOKEN_S: Final = 1.0
_MOST_UNAUTHENTICATED: Final = 32


def _first_free(host: str, ports: tuple[int, int]) -> ListeningSocket:
    first, last = ports
    for port in range(first, last):
        with contextlib.suppress(ChannelError):
            return ListeningSocket(Address(host=host, port=port))
    return ListeningSocket(Address(host=host, port=last))


class DataPort:
    """The port, whose door an endpoint serves. Thread-safe."""

    def __init__(self, host: str, ports: tuple[int, int]) -> None:
        """Listen on the first free port from `ports[0]` to `ports[1]`; 0 means any.

        Raises `ChannelError` if none is free.
        """
        self._lock = threading.Lock()
        self._awaited: dict[bytes, Incoming] = {}
        self.door: Final = Door(
            _first_free(host, ports), _MOST_UNAUTHENTICATED, partial(_Token, self)
        )

    def expect(self, connection: Connection, token: bytes) -> Incoming:
        """Accept one stream with this token of a link from now on. Close the result.

        Raises `TransferError` if a stream with this token is expected already.
        """
        incoming = Incoming(self, connection, token)
        with self._lock:
            if token in self._awaited:
                raise TransferError("the token of another copy; each copy needs a new one")
            self._awaited[token] = incoming
        return incoming

    def forget(self, incoming: Incoming) -> None:
        """Stop accepting a stream. Idempotent."""
        with self._lock:
            if self._awaited.get(incoming.token) is incoming:  # else it is another copy's by now
                del self._awaited[incoming.token]

    def end_of(self, connection: Connection) -> None:
        """Wake the threads that wait for a stream of an ended link."""
        with self._lock:
            for incoming in self._awaited.values():
                if incoming.connection is connection:
                    incoming.arrived.put(None)

    def hand_over(self, token: bytes, stream: socket.socket) -> None:
        """Give a stream to the thread that expects its token, or close it."""
        with self._lock:  # so that `Incoming.close` finds every stream that has arrived
            incoming = self._awaited.pop(token, None)
            if incoming is not None:
                incoming.arrived.put(stream)
                return
        stream.close()


class Incoming(Closing):
    """A stream that a peer opens with a token, made by `DataPort.expect`. `close()` it."""

    def __init__(self, port: DataPort, connection: Connection, token: bytes) -> None:
        self.connection: Final = connection
        self.arrived: Final[SimpleQueue[socket.socket | None]] = SimpleQueue()
        """Receives the stream; None if the link has ended."""
        self.token: Final = token
        self._port = port

    def wait(self, deadline_s: float) -> socket.socket:
        """Return the stream. Blocks. Raises `ChannelTimeoutError`, `ChannelClosedError`."""
        try:
            stream = self.arrived.get(timeout=max(deadline_s - time.monotonic(), 0))
        except Empty:
            raise ChannelTimeoutError("the peer's data stream has not come in time") from None
        if stream is None:
            raise ChannelClosedError("the link ended before the peer's data stream came")
        return stream

    def close(self) -> None:
        """Stop accepting the stream; close it if it came and nothing took it. Idempotent."""
        self._port.forget(self)
        with contextlib.suppress(Empty):
            while True:
                stream = self.arrived.get_nowait()
                if stream is not None:
                    stream.close()


class _Token(Newcomer):
    """A stream whose token is incomplete."""

    def __init__(self, port: DataPort, stream: socket.socket) -> None:
        super().__init__(stream, _TOKEN_S)
        self._port = port
        self._token = b""

    def begin(self) -> None:
        pass

    def receive(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            more = self.socket.recv(TOKEN_BYTES - len(self._token))
            if not more:
                raise AccessDeniedError("a stream that ended before its token was whole")
            self._token += more
        return len(self._token) == TOKEN_BYTES

    def admit(self) -> None:
        self._port.hand_over(self._token, self.socket)

    def refuse(self, error: Exception) -> None:
        self.socket.close()
