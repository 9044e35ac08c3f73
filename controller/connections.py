"""Clients' connections: how many there may be, and which of them take nothing of their answers.

connections = Connections(files, lambda: front.settings.server.send_timeout)
place = connections.enter(connection)     # when it is made
connections.leave(connection)             # when it is lost
connections.start()                       # in the loop: look now and then who is stuck

A client that does not read holds its answer, its request's place, its model awake, and memory. No
timer is set for it: one look at all connections a few times per `send_timeout` finds those whose
write buffer is not empty, and compares what their peers have acknowledged::

    acknowledged   |----------------|==============|.......................|
                                    ^ last mark    ^ now                   ^ all that was written
                                                                             at the last mark

It has made progress when it has taken everything that waited at the last mark, or `LEAST_BYTES` of
it. Without progress for `send_timeout` the connection is cut. So a client that is as slow as its
answer is never cut, nor one that takes 64 KiB in that time; one that reads a byte now and then is.
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

from kvelastic.controller.open_files import OpenFiles

_log = logging.getLogger("kvelastic.controller")

LEAST_BYTES: Final = 64 << 10
"""What a slow client takes in `send_timeout` at the least."""
LOOKS: Final = 8
"""In one `send_timeout`: a client is cut an eighth later at the latest."""
MOST_PAUSE_S: Final = 5.0
LEAST_PAUSE_S: Final = 0.02
_BYTES_ACKED: Final = 120
"""Where `tcpi_bytes_acked` is in the kernel's `struct tcp_info`; it never moves."""


class Place(Enum):
    """What becomes of a new connection."""

    SERVED = "served"
    REFUSED = "refused"
    """Its first request is answered with 503."""
    CLOSED = "closed"
    """There is not even room for that."""


class Connection(Protocol):
    """What is known of a connection."""

    transport: Any

    def cut(self) -> None:
        """End it now; what is not sent is lost."""


@dataclass(frozen=True)
class Sent:
    """How far a connection's peer is, in bytes since the connection was made."""

    taken_bytes: int
    """Acknowledged by the peer's kernel."""
    written_bytes: int
    """Those, and all that still waits here."""


@dataclass(frozen=True)
class Mark:
    """How far it was when it last made progress."""

    at_s: float
    sent: Sent


def has_progressed(mark: Sent, now: Sent) -> bool:
    """Whether the peer has taken what waited for it at the mark, or enough of it."""
    return now.taken_bytes >= min(mark.written_bytes, mark.taken_bytes + LEAST_BYTES)


class Connections:
    """See the module. Owned by the loop."""

    def __init__(self, files: OpenFiles, send_timeout_s: Callable[[], float]) -> None:
        self.most = files.most_connections
        self._files = files
        self._send_timeout_s = send_timeout_s
        self._served: dict[Connection, Mark | None] = {}
        self._refused: dict[Connection, Mark | None] = {}
        self.refused = 0
        """Connections that were one too many, since the start."""
        self.cut = 0
        """Connections that were cut as their clients took nothing, since the start."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open(self) -> int:
        """Connections now."""
        return len(self._served) + len(self._refused)

    def enter(self, connection: Connection) -> Place:
        """A connection was made."""
        if len(self._served) < self.most:
            self._served[connection] = None
            return Place.SERVED
        self.refused += 1
        if len(self._refused) < self._files.most_refused:
            self._refused[connection] = None
            return Place.REFUSED
        return Place.CLOSED

    def leave(self, connection: Connection) -> None:
        """It is lost; safe to repeat."""
        self._served.pop(connection, None)
        self._refused.pop(connection, None)

    def start(self) -> None:
        """Look from now on."""
        self._again()

    def stop(self) -> None:
        """Look no more."""
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
        """Cut those whose clients have taken nothing for `send_timeout`."""
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
    """Two calls of the system, for a connection whose buffer is not empty only."""
    waiting_bytes = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    try:
        (queued_bytes,) = struct.unpack(
            "i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        )
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        (taken_bytes,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
    except (OSError, struct.error):  # it is just being closed
        return Sent(0, waiting_bytes)
    return Sent(taken_bytes, taken_bytes + queued_bytes + waiting_bytes)
