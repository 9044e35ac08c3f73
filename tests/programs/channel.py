"""A client connection without an endpoint, for calls that block.

    with connect(parse_address("unix:///run/kv"), PROTOCOL) as channel:
        answer = channel.call(Ask(name="kv"), timeout_s=1.0)

Thread-safe; calls run one at a time. A lost peer is detected only by the next call.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final

from kvelastic.errors import ChannelClosedError, ChannelTimeoutError, InvalidArgumentError
from kvelastic.messages import Address, Message, Protocol, SecretFile
from kvelastic.messages.channel import Opened, open_connection, receive
from kvelastic.messages.frames import Frame, Kind, error_of


def connect(
    address: Address,
    protocol: Protocol,
    *,
    secret: SecretFile | None = None,
    timeout_s: float = 5.0,
) -> Channel:
    """Connect to the server at `address`. Blocks for at most `timeout_s` seconds.

    Raises `ChannelClosedError` if no server listens there, `ChannelTimeoutError`,
    `AccessDeniedError` (from either side), `MessageVersionError`, and `ConfigError` for TCP without
    a secret.
    """
    return Channel(address, protocol, open_connection(address, protocol, secret, timeout_s))


class Channel:
    """A channel, returned by `connect`; `close()` it, or use it as a context manager."""

    def __init__(self, address: Address, protocol: Protocol, opened: Opened) -> None:
        self.address: Final = address
        self.peer: Final = opened.peer
        self._protocol = protocol
        self._socket, _, self._reader, self._writer = opened
        self._number = 0
        self._lock = threading.Lock()

    def call(self, message: Message, timeout_s: float, descriptors: Sequence[int] = ()) -> Message:
        """Send a request and wait for its reply; close descriptors received with the reply.

        Blocks until other calls have finished, then for at most `timeout_s` seconds. Raises the
        peer's error, `ChannelTimeoutError`, `ChannelClosedError` or `MessageError`. The channel is
        closed after every error except an error reply of the peer.
        """
        reply, received = self.call_for_descriptors(message, timeout_s, descriptors)
        for fd in received:
            os.close(fd)
        return reply

    def call_for_descriptors(
        self, message: Message, timeout_s: float, descriptors: Sequence[int] = ()
    ) -> tuple[Message, tuple[int, ...]]:
        """Like `call`, but also return the received descriptors; the caller must close them."""
        body = self._protocol.encode(message)
        if descriptors and not self.address.is_unix:
            raise InvalidArgumentError("descriptors go over a Unix socket only")
        with self._lock:
            deadline_s = time.monotonic() + timeout_s
            self._number += 1
            frame = self._writer.write(Kind.REQUEST, self._number, body, len(descriptors))
            try:
                self._send(frame, descriptors, deadline_s)
                reply = self._reply(deadline_s)
            except TimeoutError:
                self.close()  # a late reply must not match the next request
                raise ChannelTimeoutError(
                    f"{self.address} has not answered a {type(message).__name__} in {timeout_s:g} s"
                ) from None
            except BaseException:
                self.close()
                raise
        if reply.kind == Kind.ERROR:
            raise error_of(reply.body)
        return self._protocol.decode(reply.body), reply.descriptors

    def _send(self, frame: bytes, descriptors: Sequence[int], deadline_s: float) -> None:
        try:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 0.001))
            sent = socket.send_fds(self._socket, [frame], descriptors) if descriptors else 0
            self._socket.sendall(frame[sent:])
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosedError(f"{self.address} has gone: {error}") from error

    def _reply(self, deadline_s: float) -> Frame:
        while True:
            frame = receive(self._socket, self._reader, deadline_s)
            if frame.kind in {Kind.REPLY, Kind.ERROR}:
                if frame.number == self._number:
                    return frame
                if frame.number == 0 and frame.kind == Kind.ERROR:
                    raise error_of(frame.body)
            # Notifications and ALIVE frames are for endpoints.
            for fd in frame.descriptors:
                os.close(fd)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()
        for fd in self._reader.take_descriptors():
            os.close(fd)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
