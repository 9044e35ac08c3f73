"""Copies over separate streams: between hosts, or on one host if memory cannot be read directly.

On a Unix link, the reader creates a socket pair and passes one end. On TCP, the client of the link
connects to the server's data port and first sends a token of 32 random bytes. The token was sent
over the link and is valid for one stream. A connection without a valid token is closed. The bytes
are not encrypted. Their checksum is sent over the link, whose messages are authenticated.

A stream ends with its link, which detects a lost host. The stream itself waits until the deadline,
because a reader that is stopped or busy for a second is not lost.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from kvelastic import _vmm
from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    TransferError,
)
from kvelastic.messages import Address, Connection
from kvelastic.messages.forked import drop_in_children
from kvelastic.messages.newcomers import Door
from kvelastic.messages.sockets import connect_socket
from kvelastic.transfer.data_port import DataPort, Incoming
from kvelastic.transfer.leases import Lease
from kvelastic.transfer.wire import TOKEN_BYTES

if TYPE_CHECKING:
    from kvelastic.transfer.link import Link

Carrier: TypeAlias = socket.socket | Incoming
"""Carries a copy's bytes: a stream that the peer passed, or will open."""


class Streams:
    """A node's data port, if it listens on TCP, and its running streams."""

    def __init__(self, host: str | None, ports: tuple[int, int] | None) -> None:
        """Listen on `host`; None opens no data port.

        See `Node` for `ports`. Raises `ChannelError`.
        """
        self._lock = threading.Lock()
        self._running: dict[Connection, set[socket.socket]] = {}
        self._port: Final = None if host is None else DataPort(host, ports or (0, 0))

    @property
    def port(self) -> int:
        """The data port; 0 if none."""
        return sum(door.listener.address.port for door in self.doors)

    @property
    def doors(self) -> tuple[Door, ...]:
        """The data port's, which an endpoint is to serve."""
        return () if self._port is None else (self._port.door,)

    def receive(self, link: Link, lease: int, ours: bytes, deadline_s: float) -> int:
        """Request the bytes under a lease and receive them; return their checksum. Blocks."""
        if link.connection.peer.uid is not None:
            return self._receive_here(link, lease, ours, deadline_s)
        token = secrets.token_bytes(TOKEN_BYTES)
        if link.is_client:
            link.ask_to_send(lease, token, deadline_s)
            return self._take(link, _connect(link, token, deadline_s), ours, deadline_s)
        with self.expect(link, token) as incoming:
            link.ask_to_send(lease, token, deadline_s)
            return self._take(link, incoming.wait(deadline_s), ours, deadline_s)

    def _receive_here(self, link: Link, lease: int, ours: bytes, deadline_s: float) -> int:
        try:
            mine, theirs = socket.socketpair()
        except OSError as error:
            raise ChannelError(f"no stream can be opened: {error}; raise `ulimit -n`") from error
        with theirs:
            drop_in_children(mine)
            try:
                link.ask_to_send(lease, b"", deadline_s, theirs)
            except BaseException:
                mine.close()
                raise
        return self._take(link, mine, ours, deadline_s)

    def _take(self, link: Link, stream: socket.socket, ours: bytes, deadline_s: float) -> int:
        with self._carrying(link, stream):
            return _vmm.receive_pieces(stream.fileno(), ours, deadline_s - time.monotonic())

    def send(
        self,
        link: Link,
        lease: Lease,
        token: bytes,
        carrier: Carrier | None,
        deadline_s: float,
    ) -> None:
        """Send the bytes under a lease, and close the carrier. Blocks. None: connect to the peer.

        If sending fails, the end of the stream notifies the peer.
        """
        with carrier or _connect(link, token, deadline_s) as opened:
            stream = opened.wait(deadline_s) if isinstance(opened, Incoming) else opened
            with self._carrying(link, stream):
                left_s = deadline_s - time.monotonic()
                lease.checksum = _vmm.send_pieces(stream.fileno(), lease.pieces, left_s)

    @contextlib.contextmanager
    def _carrying(self, link: Link, stream: socket.socket) -> Iterator[None]:
        """Close the stream after the block, or earlier if the link ends."""
        with stream:
            with self._lock:
                self._running.setdefault(link.connection, set()).add(stream)
            try:
                if not link.is_open:  # it ended before the stream was in the table
                    raise ChannelClosedError(f"the link to node {link.peer_id} has ended")
                yield
            finally:
                with self._lock:
                    running = self._running[link.connection]
                    running.discard(stream)
                    if not running:
                        del self._running[link.connection]

    def end_of(self, connection: Connection) -> None:
        """Shut down the streams of an ended link and wake threads that wait for one."""
        with self._lock:
            for stream in self._running.get(connection, ()):
                with contextlib.suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
        if self._port is not None:
            self._port.end_of(connection)

    def expect(self, link: Link, token: bytes) -> Incoming:
        """Accept one stream with this token from now on, until the link ends. Close the result.

        Raises `TransferError` if this node has no data port, or if the token is expected already.
        """
        if self._port is None:
            raise TransferError("this node takes no data streams")
        incoming = self._port.expect(link.connection, token)
        if not link.is_open:  # it ended before the token was in the table
            incoming.arrived.put(None)
        return incoming


def passed_stream(descriptors: tuple[int, ...]) -> socket.socket | None:
    """Return the stream socket that a peer passed, or None if it passed no descriptor.

    Takes ownership of the descriptors. Raises `TransferError` and closes them unless they are
    exactly one stream socket.
    """
    if not descriptors:
        return None
    first, *others = descriptors
    for fd in others:
        os.close(fd)
    try:
        stream = socket.socket(fileno=first)
    except OSError:
        os.close(first)
    else:
        if not others and stream.type == socket.SOCK_STREAM:
            drop_in_children(stream)
            return stream
        stream.close()
    raise TransferError("pass one stream socket and nothing else")


def _connect(link: Link, token: bytes, deadline_s: float) -> socket.socket:
    if not link.data_port:
        raise TransferError(f"node {link.peer_id} takes no data streams")
    address = Address(host=link.connection.peer.address, port=link.data_port)
    stream = connect_socket(address, max(deadline_s - time.monotonic(), 0.001))
    drop_in_children(stream)
    try:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(token)
    except OSError as error:
        stream.close()
        raise ChannelClosedError(f"the stream to {address} has ended: {error}") from error
    return stream
