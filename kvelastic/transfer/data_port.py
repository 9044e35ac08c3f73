"""The TCP port for data streams. Each stream starts with a token that this side expects.

A connection stays unauthenticated until it has sent all 32 bytes of an expected token. It has one
second for that. The number of such connections is bounded. At the bound, a new one replaces the
oldest. So clients that only connect cannot lock others out.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias

from kvelastic.errors import AccessDeniedError, ChannelError, KvelasticError
from kvelastic.messages import Address
from kvelastic.messages.forked import drop_in_children
from kvelastic.messages.peers import Network, check_peer, peer_of
from kvelastic.messages.sockets import ListeningSocket
from kvelastic.transfer.wire import TOKEN_BYTES

_TOKEN_S: Final = 1.0
_MOST_UNAUTHENTICATED: Final = 32
_WITHOUT_DESCRIPTORS_S: Final = 0.1

Arrived: TypeAlias = "SimpleQueue[socket.socket | None]"
"""Receives the stream with the expected token; None if its link has ended."""


class _Pending:
    """An unauthenticated stream, whose token is incomplete."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.deadline_s = time.monotonic() + _TOKEN_S
        self.token = b""


def _first_free(host: str, ports: tuple[int, int]) -> ListeningSocket:
    first, last = ports
    for port in range(first, last):
        with contextlib.suppress(ChannelError):
            return ListeningSocket(Address(host=host, port=port))
    return ListeningSocket(Address(host=host, port=last))


class DataPort:
    """Listens in its own thread; `expect` and `forget` are thread-safe. `close()` it."""

    def __init__(self, host: str, ports: tuple[int, int], allowed: list[Network]) -> None:
        """Listen on the first free port from `ports[0]` to `ports[1]`; 0 means any.

        Raises `ChannelError` if none is free.
        """
        self._allowed = allowed
        self._lock = threading.Lock()
        self._awaited: dict[bytes, Arrived] = {}
        self._pending: dict[_Pending, None] = {}
        self._is_closed = False
        self._listener: Final = _first_free(host, ports)
        try:
            self._selector = selectors.DefaultSelector()
            for opened in (self._listener.socket, self._selector):
                drop_in_children(opened)
            self._selector.register(self._listener.socket, selectors.EVENT_READ)
            self._paused_until_s: float | None = None
            self._thread = threading.Thread(target=self._run, name="kvelastic-data", daemon=True)
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise

    @property
    def port(self) -> int:
        """The actual port number."""
        return self._listener.address.port

    def expect(self, token: bytes) -> Arrived:
        """Accept one stream with this token from now on. Call `forget` afterwards."""
        arrived: Arrived = SimpleQueue()
        with self._lock:
            self._awaited[token] = arrived
        return arrived

    def forget(self, token: bytes, arrived: Arrived) -> None:
        """Stop accepting the token; close a stream that has already arrived. Idempotent."""
        with self._lock:
            if self._awaited.get(token) is arrived:
                del self._awaited[token]
        with contextlib.suppress(Empty):
            while True:
                stream = arrived.get_nowait()
                if stream is not None:
                    stream.close()

    def close(self) -> None:
        """Stop listening and join the thread. Idempotent. Does nothing in a forked child."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.is_alive():
            self._thread.join()

    # --- the listening thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, _ in self._selector.select(self._patience_s()):
                    if isinstance(key.data, _Pending):
                        self._receive(key.data)
                    else:
                        self._accept()
                self._look_at_clock()
        finally:
            for pending in list(self._pending):
                self._end(pending)
            self._selector.close()
            self._listener.close()

    def _patience_s(self) -> float | None:
        ends = [pending.deadline_s for pending in self._pending]
        if self._paused_until_s is not None:
            ends.append(self._paused_until_s)
        return max(min(ends) - time.monotonic(), 0) if ends else None

    def _look_at_clock(self) -> None:
        now_s = time.monotonic()
        for pending in [one for one in self._pending if one.deadline_s <= now_s]:
            self._receive(pending)  # accept data that arrived in time, even if this check is late
            self._end(pending)
        if self._paused_until_s is not None and self._paused_until_s <= now_s:
            self._paused_until_s = None
            self._selector.register(self._listener.socket, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.socket.accept()
        except BlockingIOError:
            return
        except OSError:
            if not self._is_closed:  # no descriptor is left: retry later
                self._selector.unregister(self._listener.socket)
                self._paused_until_s = time.monotonic() + _WITHOUT_DESCRIPTORS_S
            return
        try:
            drop_in_children(stream)
            stream.setblocking(False)
            check_peer(peer_of(stream), self._allowed)
        except (KvelasticError, OSError):
            stream.close()
            return
        while len(self._pending) >= _MOST_UNAUTHENTICATED:
            self._end(next(iter(self._pending)))
        pending = _Pending(stream)
        self._pending[pending] = None
        self._selector.register(stream, selectors.EVENT_READ, pending)

    def _receive(self, pending: _Pending) -> None:
        """Read more of the token; once it is complete, hand the stream over."""
        if pending not in self._pending:
            return  # it was closed after this event was reported
        try:
            more = pending.stream.recv(TOKEN_BYTES - len(pending.token))
            pending.token += more
            if not more:
                raise AccessDeniedError("a stream that ended before its token was whole")
            if len(pending.token) < TOKEN_BYTES:
                return
            self._hand_over(pending)
        except BlockingIOError:
            return
        except (KvelasticError, OSError):
            self._end(pending)

    def _hand_over(self, pending: _Pending) -> None:
        with self._lock:  # so that `forget` finds every stream that has arrived
            arrived = self._awaited.pop(pending.token, None)
            if arrived is None:
                raise AccessDeniedError("a stream with an unknown token")
            del self._pending[pending]
            self._selector.unregister(pending.stream)
            arrived.put(pending.stream)

    def _end(self, pending: _Pending) -> None:
        if pending in self._pending:
            del self._pending[pending]
            self._selector.unregister(pending.stream)
            pending.stream.close()
