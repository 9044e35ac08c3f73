"""An endpoint: one thread for the incoming and outgoing connections of a process.

It detects immediately when a peer's process has ended, and within a second when a peer's host is
lost (`peers.LOST_AFTER_S`).

A connection is unauthenticated (a `_Pending`) until its handshake is complete. Each has five
seconds for a step of the handshake, and may send a few hundred bytes. The number of such
connections is bounded. At the bound, a new one replaces the connection that has made no progress
for longest. Data that arrived in time counts, even if this thread reads it late.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvelastic.address import Address
from kvelastic.errors import (
    AccessDeniedError,
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    ConfigError,
    InvalidArgumentError,
    KvelasticError,
    SecretError,
)
from kvelastic.messages.channel import open_connection
from kvelastic.messages.connection import Connection, Request, receive_into
from kvelastic.messages.forked import drop_in_children
from kvelastic.messages.frames import FrameReader, FrameWriter, Kind, error_body
from kvelastic.messages.handshake import Handshake
from kvelastic.messages.peers import (
    ALIVE_EVERY_S,
    LOOPBACK,
    Peer,
    check_peer,
    networks,
    peer_of,
    prepare,
)
from kvelastic.messages.protocol import Protocol
from kvelastic.messages.secret import SecretFile
from kvelastic.messages.sockets import ListeningSocket

_log = logging.getLogger("kvelastic.messages")
_HANDSHAKE_S: Final = 5.0
_MOST_UNAUTHENTICATED: Final = 64
DEFAULT_MOST_CONNECTIONS: Final = 1024
_WITHOUT_DESCRIPTORS_S: Final = 0.1
_REFUSALS_EVERY_S: Final = 10.0

Handler = Callable[[Request], None]


class _Pending:
    """An unauthenticated connection, whose handshake is not complete."""

    def __init__(self, accepted: socket.socket, deadline_s: float) -> None:
        self.socket = accepted
        self.deadline_s = deadline_s
        self.reader = FrameReader()
        self.writer = FrameWriter()
        self.peer = Peer()
        self.handshake: Handshake | None = None


class Endpoint:
    """Listens, connects, and calls `handle` for requests in its own thread.

    `close()` it, or use it as a context manager.
    """

    def __init__(
        self,
        protocol: Protocol,
        handle: Handler,
        *,
        listen: Sequence[Address] = (),
        secret: SecretFile | None = None,
        allowed: Sequence[str] = (),
        most_connections: int = DEFAULT_MOST_CONNECTIONS,
        on_open: Callable[[Connection], None] | None = None,
        on_close: Callable[[Connection], None] | None = None,
        name: str = "kvelastic",
    ) -> None:
        """Listen on every address of `listen` (may be empty) and start the thread.

        `handle` must not block. It replies immediately, or hands the request to another thread that
        replies later. If it raises, the exception is sent as the reply. `allowed` lists the
        networks that may connect over TCP besides loopback. `on_open` and `on_close` are called in
        the thread too; `on_open` before any request of the connection.

        Raises `ConfigError` for TCP without a secret, or for an interface other than loopback
        without allowed networks. Raises `ChannelError` if an address is in use. On error,
        everything is closed.
        """
        if any(not address.is_unix for address in listen) and secret is None:
            raise ConfigError("listening on TCP needs a secret: a file of mode 0600")
        if any(not address.is_loopback for address in listen) and not allowed:
            raise ConfigError(
                "listening beyond loopback refuses every peer; name the networks to allow"
            )
        self.protocol: Final = protocol
        self._handle = handle
        self._secret = secret
        self._allowed = networks([*LOOPBACK, *allowed])
        self._most_connections = most_connections
        self._on_open, self._on_close = on_open, on_close
        self._pid = os.getpid()
        self._listeners: list[ListeningSocket] = []
        self._connections: set[Connection] = set()
        self._pending: dict[_Pending, None] = {}
        self._to_do: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._is_closing = False
        self._refused = 0
        self._refusals_said_s = float("-inf")
        self._alive_at_s = 0.0
        try:
            self._selector = selectors.DefaultSelector()
            self._waker, self._woken = socket.socketpair()
        except OSError as error:
            raise ChannelError(f"no socket can be opened: {error}; raise `ulimit -n`") from error
        try:
            for opened in (self._selector, self._waker, self._woken):
                drop_in_children(opened)
            for end in (self._waker, self._woken):
                end.setblocking(False)
            self._selector.register(self._woken, selectors.EVENT_READ)
            for address in listen:
                listener = ListeningSocket(address)
                self._listeners.append(listener)
                drop_in_children(listener.socket)
                self._selector.register(listener.socket, selectors.EVENT_READ, listener)
            self._thread = threading.Thread(target=self._run, name=f"{name}-messages", daemon=True)
            self._thread.start()
        except BaseException:
            self._close_all()
            raise

    # --- any thread ----------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Addresses on which it listens, with the actual ports."""
        return tuple(listener.address for listener in self._listeners)

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The open connections."""
        return tuple(self._connections)

    @property
    def refused(self) -> int:
        """Number of refused connections."""
        return self._refused

    def connect(self, address: Address, timeout_s: float = 5.0) -> Connection:
        """Connect to another endpoint.

        Blocks: the handshake, and then the endpoint's thread, may each take up to `timeout_s`
        seconds. Raises the errors of `channel.open_connection`, and `InvalidArgumentError` in the
        endpoint's own thread.
        """
        if threading.current_thread() is self._thread:
            raise InvalidArgumentError("a handler cannot connect; use a separate thread")
        opened = open_connection(address, self.protocol, self._secret, timeout_s)
        connection = self._make(opened.socket, opened.peer, opened.reader, opened.writer)
        adopted = threading.Event()

        def adopt() -> None:
            self._adopt(connection)
            adopted.set()

        self.run_soon(adopt)
        if not adopted.wait(timeout_s):
            connection.close()
            if self._is_closing:
                connection.release()
            raise ChannelTimeoutError(f"the connection to {address} was not taken up in time")
        return connection

    def run_soon(self, do: Callable[[], None]) -> None:
        """Call `do` in the endpoint's thread. `do` must not block. Its exceptions are logged."""
        self._to_do.append(do)
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def run_later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Call `do` in the endpoint's thread after `delay_s` seconds.

        Does nothing if the endpoint closes before that. `do` must not block.
        """
        at_s = time.monotonic() + delay_s
        self.run_soon(lambda: heapq.heappush(self._timers, (at_s, next(self._timer_numbers), do)))

    def close(self) -> None:
        """End all connections and stop listening. Blocks while a handler runs.

        Idempotent. Does nothing in a forked child, because the parent owns the endpoint.
        """
        if self._pid != os.getpid():
            return
        self._is_closing = True
        self.run_soon(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the endpoint's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for key, events in self._selector.select(self._patience_s()):
                    self._safely(self._serve, key, events)
                while self._to_do:
                    self._safely(self._to_do.popleft())
                self._safely(self._look_at_clock)
        finally:
            self._close_all()

    def _safely(self, do: Callable[..., None], *arguments: object) -> None:
        """Call `do` and log its exceptions, so that the thread survives."""
        try:
            do(*arguments)
        except Exception:
            _log.exception("the endpoint of %s goes on after a fault", self.protocol.name)

    def _patience_s(self) -> float | None:
        now_s = time.monotonic()
        waits = [pending.deadline_s for pending in itertools.islice(self._pending, 1)]
        if self._timers:
            waits.append(self._timers[0][0])
        if any(connection.peer.uid is None for connection in self._connections):
            waits.append(self._alive_at_s)
        return max(min(waits) - now_s, 0) if waits else None

    def _look_at_clock(self) -> None:
        now_s = time.monotonic()
        while self._pending and (late := next(iter(self._pending))).deadline_s <= now_s:
            self._receive_unauthenticated(late)
            if late in self._pending and late.deadline_s <= now_s:
                self._refuse(late, ChannelTimeoutError(f"no handshake in {_HANDSHAKE_S:g} s"))
        if now_s >= self._alive_at_s:
            self._alive_at_s = now_s + ALIVE_EVERY_S
            for connection in list(self._connections):
                if connection.peer.uid is None:
                    connection.send_alive(now_s, ALIVE_EVERY_S)
        while self._timers and self._timers[0][0] <= now_s:
            self._safely(heapq.heappop(self._timers)[2])

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        served = key.data
        if isinstance(served, ListeningSocket):
            self._accept(served)
        elif isinstance(served, _Pending):
            self._receive_unauthenticated(served)
        elif isinstance(served, Connection):
            if events & selectors.EVENT_WRITE:
                served.write()
            if events & selectors.EVENT_READ:
                served.read(self._guarded)
            self._settle(served)
        else:
            with contextlib.suppress(BlockingIOError):
                while self._woken.recv(4096):
                    pass

    def _guarded(self, request: Request) -> None:
        """Call the handler; send its exception as the reply."""
        try:
            self._handle(request)
        except KvelasticError as error:
            request.refuse(error)
        except Exception as error:
            _log.exception("a %s was not answered", type(request.message).__name__)
            request.refuse(error)

    # --- incoming connections ------------------------------------------------------------------

    def _accept(self, listener: ListeningSocket) -> None:
        try:
            accepted, _ = listener.socket.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                self._pause(listener)
            return
        drop_in_children(accepted)
        accepted.setblocking(False)
        pending = _Pending(accepted, time.monotonic() + _HANDSHAKE_S)
        while len(self._pending) >= _MOST_UNAUTHENTICATED:
            self._refuse(next(iter(self._pending)), ChannelError("others came after it"))
        self._pending[pending] = None
        self._selector.register(accepted, selectors.EVENT_READ, pending)
        try:
            prepare(accepted)
            pending.peer = peer_of(accepted)
            check_peer(pending.peer, self._allowed)
            if len(self._connections) >= self._most_connections:
                raise ChannelError(f"{self._most_connections} connections stand already")
            secret = self._secret if pending.peer.uid is None else None
            pending.handshake = Handshake(
                self.protocol, secret, pending.reader, pending.writer, is_client=False
            )
        except (KvelasticError, OSError) as error:
            self._refuse(pending, error)

    def _pause(self, listener: ListeningSocket) -> None:
        """Stop accepting for a while because no descriptor is left; avoids a busy loop."""
        self._selector.unregister(listener.socket)

        def look_again() -> None:
            self._selector.register(listener.socket, selectors.EVENT_READ, listener)

        self.run_later(_WITHOUT_DESCRIPTORS_S, look_again)

    def _receive_unauthenticated(self, pending: _Pending) -> None:
        handshake = pending.handshake
        if pending not in self._pending or handshake is None:
            return  # it was closed after this event was reported
        try:
            receive_into(pending.socket, pending.reader)
            while not handshake.is_done and (frame := pending.reader.next()) is not None:
                answer = handshake.receive(frame)
                # The handshake made progress, at most twice: restart the timeout and move the
                # connection to the end of the queue.
                pending.deadline_s = time.monotonic() + _HANDSHAKE_S
                self._pending[pending] = self._pending.pop(pending)
                # A new socket has room for a few hundred bytes. If not, the peer is not reading.
                if answer and pending.socket.send(answer) != len(answer):
                    raise ChannelClosedError("the peer does not read during the handshake")
        except (KvelasticError, OSError) as error:
            self._refuse(pending, error)
            return
        if handshake.is_done:
            del self._pending[pending]
            self._selector.unregister(pending.socket)
            self._adopt(self._make(pending.socket, pending.peer, pending.reader, pending.writer))

    def _refuse(self, pending: _Pending, error: Exception) -> None:
        del self._pending[pending]
        self._selector.unregister(pending.socket)
        reported: Exception = error
        if isinstance(error, SecretError):  # details of our secret file belong in our log only
            reported = AccessDeniedError(
                "it refuses connections for now; the log of the peer says why"
            )
        with contextlib.suppress(OSError):
            pending.socket.send(pending.writer.write(Kind.ERROR, 0, error_body(reported)))
        for fd in pending.reader.take_descriptors():
            os.close(fd)
        pending.socket.close()
        if isinstance(error, ChannelClosedError):
            return  # the peer closed the connection, as a probe does
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._refusals_said_s >= _REFUSALS_EVERY_S:
            self._refusals_said_s = now_s
            level = logging.WARNING if isinstance(error, AccessDeniedError) else logging.INFO
            _log.log(
                level,
                "refused the connection of %s (%d refused so far): %s",
                pending.peer or "a peer",
                self._refused,
                error,
            )

    def _make(
        self, connected: socket.socket, peer: Peer, reader: FrameReader, writer: FrameWriter
    ) -> Connection:
        connected.setblocking(False)
        return Connection(
            connected,
            peer,
            self.protocol,
            reader,
            writer,
            wake=lambda connection: self.run_soon(lambda: self._settle(connection)),
            loop_thread=lambda: self._thread.ident,
        )

    def _adopt(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        if self._on_open is not None:
            self._on_open(connection)
        connection.read(self._guarded)  # the reader may already hold data sent with the handshake
        self._settle(connection)

    def _settle(self, connection: Connection) -> None:
        """Update the selector for the connection; remove the connection if it has ended."""
        if connection not in self._connections:
            return
        if connection.is_open:
            events = selectors.EVENT_READ
            if connection.wants_to_write:
                events |= selectors.EVENT_WRITE
            self._selector.modify(connection.socket, events, connection)
            return
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.release()
        if self._on_close is not None:
            self._on_close(connection)

    def _close_all(self) -> None:
        for listener in self._listeners:
            listener.close()
        for pending in list(self._pending):
            self._refuse(pending, ChannelClosedError("the endpoint closes"))
        for connection in list(self._connections):
            connection.close()
            self._safely(self._settle, connection)
        for opened in (self._selector, self._waker, self._woken):
            opened.close()
