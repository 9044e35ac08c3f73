"""A client connection without an endpoint, for calls that block.

    with connect(parse_address("unix:///run/kv"), PROTOCOL) as channel:
        answer = channel.call(Ask(name="kv"), timeout_s=1.0)

Thread-safe; calls run one at a time. A lost peer is detected only by the next call. Use an
`Endpoint` to detect it immediately.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvelastic.errors import (
    ChannelClosedError,
    ChannelTimeoutError,
    ConfigError,
    InvalidArgumentError,
    KvelasticError,
)
from kvelastic.messages.addresses import Address, connect_socket
from kvelastic.messages.connection import receive_into
from kvelastic.messages.forked import drop_in_children
from kvelastic.messages.frames import Frame, FrameReader, FrameWriter, Kind, error_of
from kvelastic.messages.handshake import Handshake
from kvelastic.messages.peers import Peer, check_peer, peer_of, prepare
from kvelastic.messages.protocol import Message, Protocol
from kvelastic.messages.secret import SecretFile


class Opened(NamedTuple):
    """A connected socket after the handshake."""

    socket: socket.socket
    peer: Peer
    reader: FrameReader
    writer: FrameWriter


def open_connection(
    address: Address, protocol: Protocol, secret: SecretFile | None, timeout_s: float
) -> Opened:
    """Connect and do the handshake. Blocks for at most `timeout_s` seconds. Raises as `connect`."""
    if not address.is_unix and secret is None:
        raise ConfigError(f"{address} needs a secret: give the file that the peer has as well")
    deadline_s = time.monotonic() + timeout_s
    connected = connect_socket(address, timeout_s)
    reader, writer = FrameReader(), FrameWriter()
    try:
        drop_in_children(connected)
        prepare(connected)
        peer = peer_of(connected)
        check_peer(peer, None)
        handshake = Handshake(
            protocol, None if address.is_unix else secret, reader, writer, is_client=True
        )
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # A server that refuses the connection has sent the reason, and may have closed it.
            connected.sendall(handshake.begin())
        while not handshake.is_done:
            frame = _receive(connected, reader, deadline_s)
            if answer := handshake.receive(frame):
                connected.sendall(answer)
    except BaseException as error:
        connected.close()
        for fd in reader.take_descriptors():
            os.close(fd)
        if isinstance(error, KvelasticError) or not isinstance(error, OSError):
            raise
        if isinstance(error, TimeoutError):
            raise ChannelTimeoutError(f"{address} has not answered in {timeout_s:g} s") from error
        raise ChannelClosedError(f"{address} has gone: {error}") from error
    return Opened(connected, peer, reader, writer)


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
            frame = _receive(self._socket, self._reader, deadline_s)
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


def _receive(connected: socket.socket, reader: FrameReader, deadline_s: float) -> Frame:
    """Return the next frame. Blocks; raises TimeoutError at the deadline."""
    while (frame := reader.next()) is None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connected.settimeout(left_s)
        receive_into(connected, reader)
    return frame
