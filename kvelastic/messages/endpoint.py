"""An endpoint: one thread for the incoming and outgoing connections of a process.

It detects immediately when a peer's process has ended, and within a second when a peer's host is
lost (`peers.LOST_AFTER_S`).

A connection is a `Newcomer` until its handshake is complete. An incoming one has five seconds for a
step of the handshake, and may send a few hundred bytes.
"""

from __future__ import annotations

import contextlib
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
from concurrent.futures import Future, wait
from functools import partial
from math import inf
from typing import Final

from kvelastic.address import Address
from kvelastic.closing import Closing
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
from kvelastic.messages.connection import Connection, Request, receive_into
from kvelastic.messages.forked import drop_in_children
from kvelastic.messages.frames import FrameReader, FrameWriter, Kind, error_body
from kvelastic.messages.handshake import Handshake
from kvelastic.messages.newcomers import Door, Newcomer, Newcomers
from kvelastic.messages.peers import (
    ALIVE_EVERY_S,
    LOOPBACK,
    Peer,
    networks,
    prepare,
)
from kvelastic.messages.protocol import Protocol
from kvelastic.messages.secret import SecretFile
from kvelastic.messages.sockets import ListeningSocket, connect_socket

_log = logging.getLogger("kvelastic.messages")
_HANDSHAKE_S: Final = 5.0
_MOST_UNAUTHENTICATED: Final = 64
DEFAULT_MOST_CONNECTIONS: Final = 1024
_REFUSALS_EVERY_S: Final = 10.0

Handler = Callable[[Request], None]


class _Guest(Newcomer):
    """A connection during its handshake, opened by either side."""

    def __init__(self, endpoint: Endpoint, connected: socket.socket, *, is_client: bool) -> None:
        super().__init__(connected, inf if is_client else _HANDSHAKE_S)
        self.opened: Final[Future[Connection]] = Future()
        """The connection of a client, which its caller awaits."""
        self._endpoint = endpoint
        self._is_client = is_client
        self._reader, self._writer = FrameReader(), FrameWriter()

    def begin(self) -> None:
        prepare(self.socket)
        self._handshake = self._endpoint.handshake(
            self.peer, self._reader, self._writer, is_client=self._is_client
        )
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # A server that refuses the connection has sent the reason, and may have closed it.
            self._send(self._handshake.begin())

    def receive(self) -> bool:
        receive_into(self.socket, self._reader)
        while not self._handshake.is_done and (frame := self._reader.next()) is not None:
            answer = self._handshake.receive(frame)
            self.has_progressed()  # at most twice
            self._send(answer)
        return self._handshake.is_done

    def _send(self, data: bytes) -> None:
        # A new socket has room for a few hundred bytes. If not, the peer is not reading.
        if data and self.socket.send(data) != len(data):
            raise ChannelClosedError("the peer does not read during the handshake")

    def admit(self) -> None:
        self.opened.set_result(
            self._endpoint.adopt(self.socket, self.peer, self._reader, self._writer)
        )

    def refuse(self, error: Exception) -> None:
        if self._is_client:
            self.opened.set_exception(error)
        else:
            self._endpoint.note_refusal(self.peer, error)
            reported = error
            if isinstance(error, SecretError):  # details of our secret file belong in our log only
                reported = AccessDeniedError(
                    "it refuses connections for now; the log of the peer says why"
                )
            with contextlib.suppress(OSError):
                self.socket.send(self._writer.write(Kind.ERROR, 0, error_body(reported)))
        for fd in self._reader.take_descriptors():
            os.close(fd)
        self.socket.close()


def _close_unused(opened: Future[Connection]) -> None:
    if opened.exception() is None:
        opened.result().close()


class Endpoint(Closing):
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
        on_close: Callable[[Connection], None] | None = None,
        doors: Sequence[Door] = (),
        name: str = "kvelastic",
    ) -> None:
        """Listen on every address of `listen` (may be empty) and start the thread.

        `handle` must not block. It replies immediately, or hands the request to another thread that
        replies later. If it raises, the exception is sent as the reply. `allowed` lists the
        networks that may connect over TCP besides loopback. `on_close` is called in the thread too.
        `doors` are further ones that the thread serves, and closes at the end.

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
        self._most_connections = most_connections
        self._on_close = on_close
        self._pid = os.getpid()
        self._listeners: list[ListeningSocket] = []
        self._doors = list(doors)
        self._connections: set[Connection] = set()
        self._to_do: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._is_closing = False
        self._refused = 0
        self._refusals_said_s = float("-inf")
        self._alive_at_s = 0.0
        peers = networks([*LOOPBACK, *allowed])
        try:
            self._selector = selectors.DefaultSelector()
            self._waker, self._woken = socket.socketpair()
        except OSError as error:
            raise ChannelError(f"no socket can be opened: {error}; raise `ulimit -n`") from error
        self._newcomers = Newcomers(self._selector, peers, self.run_later)
        try:
            for opened in (self._selector, self._waker, self._woken):
                drop_in_children(opened)
            for end in (self._waker, self._woken):
                end.setblocking(False)
            self._selector.register(self._woken, selectors.EVENT_READ)
            greet = partial(_Guest, self, is_client=False)
            for address in listen:
                listener = ListeningSocket(address)
                self._listeners.append(listener)
                self._doors.append(Door(listener, _MOST_UNAUTHENTICATED, greet))
            for door in self._doors:
                drop_in_children(door.listener.socket)
                self._newcomers.listen(door)
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

        Blocks for at most `timeout_s` seconds. Raises `ChannelClosedError` if no server listens
        there or it does not accept in time, `ChannelTimeoutError` if it does not answer,
        `AccessDeniedError` (from either side), `MessageVersionError`, `ConfigError` for TCP without
        a secret, and `InvalidArgumentError` in the endpoint's own thread. After any exception, also
        of a signal's handler, the connection is closed.
        """
        if threading.current_thread() is self._thread:
            raise InvalidArgumentError("a handler cannot connect; use a separate thread")
        if not address.is_unix and self._secret is None:
            raise ConfigError(f"{address} needs a secret: give the file that the peer has as well")
        deadline_s = time.monotonic() + timeout_s
        connected = connect_socket(address, timeout_s)
        drop_in_children(connected)
        connected.setblocking(False)
        guest = _Guest(self, connected, is_client=True)
        try:
            self.run_soon(partial(self._newcomers.add, guest))
            wait([guest.opened], max(deadline_s - time.monotonic(), 0))
            if not guest.opened.done():
                raise ChannelTimeoutError(f"{address} has not answered in {timeout_s:g} s")
            return guest.opened.result()
        except BaseException as error:
            guest.opened.add_done_callback(_close_unused)
            gone = ChannelClosedError("the caller of `connect` has stopped waiting")
            self.run_soon(partial(self._newcomers.refuse, guest, gone))
            if self._is_closing:  # the thread may have ended
                connected.close()
            if isinstance(error, OSError) and not isinstance(error, KvelasticError):
                raise ChannelClosedError(f"{address} has gone: {error}") from error
            raise

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

    # --- the endpoint's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for key, events in self._selector.select(self._patience_s()):
                    self._safely(self._serve, key, events)
                self._do_all()
                self._safely(self._look_at_clock)
            self._do_all()  # a caller may have handed over a socket just before the end
        finally:
            self._close_all()

    def _do_all(self) -> None:
        while self._to_do:
            self._safely(self._to_do.popleft())

    def _safely(self, do: Callable[..., None], *arguments: object) -> None:
        """Call `do` and log its exceptions, so that the thread survives."""
        try:
            do(*arguments)
        except Exception:
            _log.exception("the endpoint of %s goes on after a fault", self.protocol.name)

    def _patience_s(self) -> float | None:
        now_s = time.monotonic()
        waits = [newcomer.deadline_s for newcomer in self._newcomers.doors]
        if self._timers:
            waits.append(self._timers[0][0])
        if any(connection.peer.uid is None for connection in self._connections):
            waits.append(self._alive_at_s)
        first_s = min(waits, default=inf)
        return None if first_s == inf else max(first_s - now_s, 0)

    def _look_at_clock(self) -> None:
        now_s = time.monotonic()
        if self._newcomers.doors:
            self._newcomers.expire(now_s)
        if now_s >= self._alive_at_s:
            self._alive_at_s = now_s + ALIVE_EVERY_S
            for connection in list(self._connections):
                if connection.peer.uid is None:
                    connection.send_alive(now_s, ALIVE_EVERY_S)
        while self._timers and self._timers[0][0] <= now_s:
            self._safely(heapq.heappop(self._timers)[2])

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        served = key.data
        if isinstance(served, Door):
            self._newcomers.accept(served)
        elif isinstance(served, Newcomer):
            self._newcomers.receive(served)
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
        with request.refusing_errors():
            self._handle(request)

    # --- new connections ------------------------------------------------------------------------

    def handshake(
        self, peer: Peer, reader: FrameReader, writer: FrameWriter, *, is_client: bool
    ) -> Handshake:
        """Begin a handshake. Raises `SecretError`, and `ChannelError` at the bound."""
        if not is_client and len(self._connections) >= self._most_connections:
            raise ChannelError(f"{self._most_connections} connections stand already")
        secret = self._secret if peer.uid is None else None
        return Handshake(self.protocol, secret, reader, writer, is_client=is_client)

    def adopt(
        self, connected: socket.socket, peer: Peer, reader: FrameReader, writer: FrameWriter
    ) -> Connection:
        """Serve a connection after its handshake."""
        connection = Connection(
            connected,
            peer,
            self.protocol,
            reader,
            writer,
            wake=lambda connection: self.run_soon(lambda: self._settle(connection)),
            loop_thread=lambda: self._thread.ident,
        )
        self._connections.add(connection)
        self._selector.register(connected, selectors.EVENT_READ, connection)
        connection.read(self._guarded)  # the reader may already hold data sent with the handshake
        self._settle(connection)
        return connection

    def note_refusal(self, peer: Peer, error: Exception) -> None:
        """Count a refused connection, and log some."""
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
                peer,
                self._refused,
                error,
            )

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
        for door in self._doors:
            door.listener.close()
        self._newcomers.refuse_all(ChannelClosedError("the endpoint closes"))
        for connection in list(self._connections):
            connection.close()
            self._safely(self._settle, connection)
        for opened in (self._selector, self._waker, self._woken):
            opened.close()
