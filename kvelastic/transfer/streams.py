"""Bytes over streams of their own: between hosts, and where memory cannot be read on one host.

On a Unix link the reader makes a pair of sockets and passes one end. On TCP whoever has made the
link connects to the other's data port and begins with a token of 32 random bytes, which has come
over the link and is good for one stream. What comes without a token is closed. The bytes are in
clear; their checksum comes over the link, whose messages cannot be forged.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

from kvelastic import _vmm
from kvelastic.errors import (
    AccessDeniedError,
    ChannelClosedError,
    ChannelTimeoutError,
    KvelasticError,
    TransferError,
)
from kvelastic.messages import Address
from kvelastic.messages.addresses import ListeningSocket, connect_socket
from kvelastic.messages.forked import drop_in_children
from kvelastic.messages.peers import Network, check_peer, peer_of, prepare
from kvelastic.transfer.leases import Lease
from kvelastic.transfer.wire import TOKEN_BYTES

if TYPE_CHECKING:
    from kvelastic.transfer.link import Link

_TOKEN_S: Final = 1.0
_MOST_STRANGERS: Final = 32


Arrived: TypeAlias = "SimpleQueue[socket.socket]"
"""Where a stream is put whose token was expected."""


class Streams:
    """Of a node: its data port, if it listens on TCP, and the tokens that it waits for."""

    def __init__(self, host: str | None, allowed: list[Network]) -> None:
        """`host` None: nobody connects. Raises `ChannelError`."""
        self._allowed = allowed
        self._lock = threading.Lock()
        self._awaited: dict[bytes, Arrived] = {}
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._listener: ListeningSocket | None = None
        if host is not None:
            self._listener = ListeningSocket(Address(host=host))
            drop_in_children(self._listener.socket)
            self._listener.socket.setblocking(True)
            threading.Thread(target=self._accept, name="kvelastic-data", daemon=True).start()

    @property
    def port(self) -> int:
        """Where streams come; 0: nowhere."""
        return 0 if self._listener is None else self._listener.address.port

    def receive(self, link: Link, lease: int, ours: bytes, deadline_s: float) -> int:
        """Ask the peer to send what a lease holds, and take it; returns its checksum. Blocks."""
        if link.connection.peer.uid is not None:
            return self._receive_here(link, lease, ours, deadline_s)
        token = secrets.token_bytes(TOKEN_BYTES)
        if link.is_client:
            link.ask_to_send(lease, token, deadline_s)
            with _connect(link, token, deadline_s) as stream:
                return _vmm.receive_pieces(stream.fileno(), ours, deadline_s - time.monotonic())
        arrived = self.expect(token)
        try:
            link.ask_to_send(lease, token, deadline_s)
            with _wait(arrived, deadline_s) as stream:
                return _vmm.receive_pieces(stream.fileno(), ours, deadline_s - time.monotonic())
        finally:
            self._forget(token, arrived)

    def _receive_here(self, link: Link, lease: int, ours: bytes, deadline_s: float) -> int:
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                drop_in_children(mine)
                link.ask_to_send(lease, b"", deadline_s, theirs)
            return _vmm.receive_pieces(mine.fileno(), ours, deadline_s - time.monotonic())

    def send(
        self,
        link: Link,
        lease: Lease,
        token: bytes,
        carrier: int | Arrived | None,
        deadline_s: float,
    ) -> None:
        """Send what a lease holds; the peer learns of a failure by the stream's end. Blocks.

        `carrier`: a descriptor that the peer has passed, or what `expect` answered for the token;
        None: this side connects.
        """
        if isinstance(carrier, int):
            stream = socket.socket(fileno=carrier)
        elif carrier is None:
            stream = _connect(link, token, deadline_s)
        else:
            try:
                stream = _wait(carrier, deadline_s)
            finally:
                self._forget(token, carrier)
        with stream:
            left_s = min(deadline_s, lease.deadline_s) - time.monotonic()
            lease.checksum = _vmm.send_pieces(stream.fileno(), lease.pieces, left_s)

    def expect(self, token: bytes) -> Arrived:
        """From now on a stream of this token is taken: one. `send` is to be called for it."""
        arrived: Arrived = SimpleQueue()
        with self._lock:
            self._awaited[token] = arrived
        return arrived

    def _forget(self, token: bytes, arrived: Arrived) -> None:
        with self._lock:
            self._awaited.pop(token, None)
        with contextlib.suppress(Empty):
            while True:
                arrived.get_nowait().close()

    def close(self) -> None:
        """Take no more streams."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.socket.shutdown(socket.SHUT_RDWR)  # ends the accept that waits
            listener.close()

    def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        while True:
            try:
                stream, _ = listener.socket.accept()
            except OSError:
                if self._listener is None:
                    return
                time.sleep(0.1)  # no descriptor is left: look again in a while
                continue
            drop_in_children(stream)
            if not self._strangers.acquire(blocking=False):
                stream.close()
                continue
            try:
                threading.Thread(target=self._meet, args=(stream,), daemon=True).start()
            except RuntimeError:
                self._strangers.release()
                stream.close()

    def _meet(self, stream: socket.socket) -> None:
        """Read the token of one that has come, and give the stream to whoever waits for it."""
        try:
            check_peer(peer_of(stream), self._allowed)
            stream.settimeout(_TOKEN_S)
            token = b""
            while len(token) < TOKEN_BYTES and (more := stream.recv(TOKEN_BYTES - len(token))):
                token += more
            prepare(stream)
            with self._lock:  # so that whoever stops waiting finds all that has come
                arrived = self._awaited.pop(token, None)
                if arrived is None:
                    raise AccessDeniedError("a stream with a token that nobody waits for")
                arrived.put(stream)
        except (KvelasticError, OSError):
            stream.close()
        finally:
            self._strangers.release()


def _connect(link: Link, token: bytes, deadline_s: float) -> socket.socket:
    if not link.data_port:
        raise TransferError(f"node {link.peer_id} takes no data streams")
    address = Address(host=link.connection.peer.address, port=link.data_port)
    stream = connect_socket(address, max(deadline_s - time.monotonic(), 0.001))
    drop_in_children(stream)
    try:
        prepare(stream)
        stream.sendall(token)
    except OSError as error:
        stream.close()
        raise ChannelClosedError(f"the stream to {address} has ended: {error}") from error
    return stream


def _wait(arrived: Arrived, deadline_s: float) -> socket.socket:
    try:
        return arrived.get(timeout=max(deadline_s - time.monotonic(), 0))
    except Empty:
        raise ChannelTimeoutError("the peer's data stream has not come in time") from None
