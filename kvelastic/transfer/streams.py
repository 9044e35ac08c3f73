"""Bytes over streams of their own: between hosts, and where memory cannot be read on one host.

On a Unix link the reader makes a pair of sockets and passes one end. On TCP whoever has made the
link connects to the other's data port and begins with a token of 32 random bytes, which has come
over the link and is good for one stream. What comes without a token is closed. The bytes are in
clear; their checksum comes over the link, whose messages cannot be forged.

A stream ends with its link, which notices a host that is lost. By itself it is patient until the
deadline: a reader that is stopped or busy for a second is late, not lost.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from queue import Empty
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from kvelastic import _vmm
from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    TransferError,
)
from kvelastic.messages import Address, Connection
from kvelastic.messages.addresses import connect_socket
from kvelastic.messages.forked import drop_in_children
from kvelastic.messages.peers import Network
from kvelastic.transfer.data_port import Arrived, DataPort
from kvelastic.transfer.leases import Lease
from kvelastic.transfer.wire import TOKEN_BYTES

if TYPE_CHECKING:
    from kvelastic.transfer.link import Link

_T = TypeVar("_T")
Carrier: TypeAlias = "socket.socket | Arrived | None"
"""What a copy's bytes travel by: a socket that the peer has passed, one that is awaited, or none
yet, where this side connects."""


class Streams:
    """Of a node: its data port, if it listens on TCP, and the streams that run."""

    def __init__(
        self,
        host: str | None,
        allowed: list[Network],
        ports: tuple[int, int] | None = None,
    ) -> None:
        """`host` None: nobody connects. `ports` as `Node` has them. Raises `ChannelError`."""
        self._lock = threading.Lock()
        self._running: dict[Connection, set[socket.socket]] = {}
        self._expected: dict[Connection, set[Arrived]] = {}
        self._port: Final = None if host is None else DataPort(host, ports or (0, 0), allowed)

    @property
    def port(self) -> int:
        """Where streams come; 0: nowhere."""
        return 0 if self._port is None else self._port.port

    def receive(self, link: Link, lease: int, ours: bytes, deadline_s: float) -> int:
        """Ask the peer to send what a lease holds, and take it; returns its checksum. Blocks."""
        if link.connection.peer.uid is not None:
            return self._receive_here(link, lease, ours, deadline_s)
        token = secrets.token_bytes(TOKEN_BYTES)
        if link.is_client:
            link.ask_to_send(lease, token, deadline_s)
            return self._take(link, _connect(link, token, deadline_s), ours, deadline_s)
        arrived = self.expect(link, token)
        try:
            link.ask_to_send(lease, token, deadline_s)
            return self._take(link, _wait(arrived, deadline_s), ours, deadline_s)
        finally:
            self.forget(link, token, arrived)

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
        carrier: Carrier,
        deadline_s: float,
    ) -> None:
        """Send what a lease holds; the peer learns of a failure by the stream's end. Blocks."""
        if isinstance(carrier, socket.socket):
            stream = carrier
        elif carrier is None:
            stream = _connect(link, token, deadline_s)
        else:
            try:
                stream = _wait(carrier, deadline_s)
            finally:
                self.forget(link, token, carrier)
        with self._carrying(link, stream):
            left_s = deadline_s - time.monotonic()
            lease.checksum = _vmm.send_pieces(stream.fileno(), lease.pieces, left_s)

    @contextlib.contextmanager
    def _carrying(self, link: Link, stream: socket.socket) -> Iterator[None]:
        """The stream ends with the link, and in any case with the block."""
        with stream:
            with self._lock:
                self._running.setdefault(link.connection, set()).add(stream)
            try:
                if not link.is_open:  # it ended before the stream stood in the table
                    raise ChannelClosedError(f"the link to node {link.peer_id} has ended")
                yield
            finally:
                with self._lock:
                    _discard(self._running, link.connection, stream)

    def end_of(self, connection: Connection) -> None:
        """The link has ended: so do its streams, and whoever waits for their bytes is told."""
        with self._lock:
            for stream in self._running.get(connection, ()):
                with contextlib.suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
            for arrived in self._expected.get(connection, ()):
                arrived.put(None)

    def expect(self, link: Link, token: bytes) -> Arrived:
        """From now on one stream of this token is let in, until the link ends.

        `send`, `forget` or `abandon` is to follow. Raises `TransferError` where this node has no
        data port.
        """
        if self._port is None:
            raise TransferError("this node takes no data streams")
        arrived = self._port.expect(token)
        with self._lock:
            self._expected.setdefault(link.connection, set()).add(arrived)
        if not link.is_open:  # it ended before the token stood in the table
            arrived.put(None)
        return arrived

    def forget(self, link: Link, token: bytes, arrived: Arrived) -> None:
        """Stop letting a stream of this token in. Safe to repeat."""
        with self._lock:
            _discard(self._expected, link.connection, arrived)
        if self._port is not None:
            self._port.forget(token, arrived)

    def abandon(self, link: Link, token: bytes, carrier: Carrier) -> None:
        """In place of `send`: nothing is sent, and the peer learns that by the stream's end."""
        if isinstance(carrier, socket.socket):
            carrier.close()
        elif carrier is not None:
            self.forget(link, token, carrier)

    def close(self) -> None:
        """Take no more streams."""
        if self._port is not None:
            self._port.close()


def passed_stream(descriptors: tuple[int, ...]) -> socket.socket | None:
    """The stream socket that a peer has passed; None: it has passed nothing.

    The descriptors are taken over, and closed unless they are just that. Raises `TransferError`.
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
    raise TransferError("one stream socket is to be passed, nothing else")


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


def _wait(arrived: Arrived, deadline_s: float) -> socket.socket:
    try:
        stream = arrived.get(timeout=max(deadline_s - time.monotonic(), 0))
    except Empty:
        raise ChannelTimeoutError("the peer's data stream has not come in time") from None
    if stream is None:
        raise ChannelClosedError("the link ended before the peer's data stream came")
    return stream


def _discard(table: dict[Connection, set[_T]], connection: Connection, one: _T) -> None:
    """Remove one of a connection's, if it is there, and the connection with its last."""
    left = table.get(connection, set())
    left.discard(one)
    if not left:
        table.pop(connection, None)
