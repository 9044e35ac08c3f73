"""Bounds the number of clients' connections, and cuts those whose clients do not read.

connections = Connections(files, lambda: app_state.settings.server.send_timeout)
state = connections.enter(connection)     # when it is made
connections.leave(connection)             # when it is lost
connections.start()                       # in the loop: check periodically for stuck clients

A client that does not read keeps its response, a request slot and memory, and its model awake.
There is no timer per connection. A few times per `send_timeout` one scan of all connections finds
those whose write buffer is not empty, and compares the bytes that their peers have acknowledged::

    acknowledged   |----------------|==============|.......................|
                                    ^ last mark    ^ now                   ^ all bytes written
                                                                             at the last mark

A client has made progress if it has taken all bytes pending at the last mark, or `LEAST_BYTES` of
them. Without progress for `send_timeout` the connection is cut. So a client that keeps up with its
response is never cut, and neither is a client that takes 64 KiB in that time. A client that reads
only a few bytes is cut.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from kvelastic.controller.http.open_files import OpenFiles

_log = logging.getLogger("kvelastic.controller")

LEAST_BYTES: Final = 64 << 10
"""Minimum that a slow client must take within `send_timeout`."""
LOOKS: Final = 8
"""Scans per `send_timeout`: a client is cut at most an eighth of it late."""
MOST_PAUSE_S: Final = 5.0
LEAST_PAUSE_S: Final = 0.02
_BYTES_ACKED: Final = 120
"""Offset of `tcpi_bytes_acked` in the kernel's `struct tcp_info`, a stable ABI."""


class ConnectionState(Enum):
    """How a new connection is treated."""

    SERVED = "served"
    REFUSED = "refused"
    """Its first request gets a 503."""
    CLOSED = "closed"
    """Closed immediately, because too many connections are already being refused."""


class Connection(Protocol):
    """The interface of a connection."""

    transport: Any

    def cut(self) -> None:
        """Abort the connection; unsent data is lost."""


@dataclass(frozen=True)
class Sent:
    """A connection's progress, in bytes since it was made."""

    taken_bytes: int
    """Acknowledged by the peer's kernel."""
    written_bytes: int
    """`taken_bytes` plus all bytes still queued on this side."""


@dataclass(frozen=True)
class Mark:
    """A connection's progress at the time `at_s` of the last mark."""

    at_s: float
    sent: Sent


def has_progressed(mark: Sent, now: Sent) -> bool:
    """Return True if the peer has taken all bytes pending at the mark, or `LEAST_BYTES`."""
    return now.taken_bytes >= min(mark.written_bytes, mark.taken_bytes + LEAST_BYTES)


class Connections:
    """All clients' connections, and the periodic scan. Use it in the event loop."""

    def __init__(self, files: OpenFiles, send_timeout_s: Callable[[], float]) -> None:
        self.most = files.most_connections
        self._files = files
        self._send_timeout_s = send_timeout_s
        self._served: dict[Connection, Mark | None] = {}
        self._refused: dict[Connection, Mark | None] = {}
        self.refused = 0
        """Connections refused or closed as excess, since the start."""
        self.cut = 0
        """Connections cut because their clients did not read, since the start."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open(self) -> int:
        """Number of open connections."""
        return len(self._served) + len(self._refused)

    def enter(self, connection: Connection) -> ConnectionState:
        """Register a new connection; return how to treat it."""
        if len(self._served) < self.most:
            self._served[connection] = None
            return ConnectionState.SERVED
        self.refused += 1
        if len(self._refused) < self._files.most_refused:
            self._refused[connection] = None
            return ConnectionState.REFUSED
        return ConnectionState.CLOSED

    def leave(self, connection: Connection) -> None:
        """Remove a lost connection. Idempotent."""
        self._served.pop(connection, None)
        self._refused.pop(connection, None)

    def start(self) -> None:
        """Start the periodic scan."""
        self._again()

    def stop(self) -> None:
        """Stop the periodic scan."""
        if self._timer is not None:
            self._timer.cancel()

    def _again(self) -> None:
        pause_s = min(MOST_PAUSE_S, max(LEAST_PAUSE_S, (self._send_timeout_s() or 60.0) / LOOKS))
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look_and_again)

    def _look_and_again(self) -> None:
        try:
            self._files.probe()
            self.look()
        except Exception:
            _log.exception("connections were not looked at; the next look follows")
        finally:
            self._again()

    def look(self) -> None:
        """Scan once: cut connections without progress for `send_timeout`."""
        timeout_s = self._send_timeout_s()
        if not timeout_s:
            return
        now_s = time.monotonic()
        stuck: list[Connection] = []
        for group in (self._served, self._refused):
            for connection, mark in group.items():
                transport = connection.transport
                if not transport.get_write_buffer_size():
                    if mark is not None:
                        group[connection] = None
                    continue
                sent = _sent(transport)
                if mark is None or has_progressed(mark.sent, sent):
                    group[connection] = Mark(now_s, sent)
                elif now_s - mark.at_s >= timeout_s:
                    stuck.append(connection)
        for connection in stuck:
            self.cut += 1
            connection.cut()


def _sent(transport: Any) -> Sent:
    """Return a connection's progress. Costs two system calls; use it if the buffer is not empty."""
    waiting_bytes = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    try:
        (queued_bytes,) = struct.unpack(
            "i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        )
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        (taken_bytes,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
    except (OSError, struct.error):  # the connection is being closed
        return Sent(0, waiting_bytes)
    return Sent(taken_bytes, taken_bytes + queued_bytes + waiting_bytes)
