"""uvicorn's HTTP protocol with additional bounds: on headers, connections, and slow clients.

It also notifies pipelined requests when their client disconnects. It accepts WebSockets on the
paths that serve them and refuses other upgrades. Malformed HTTP gets a JSON response.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvelastic.controller.http.connections import Connections, ConnectionState
from kvelastic.controller.http.engine_paths import is_realtime
from kvelastic.controller.http.origins import Origins
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.replies import refusal_parts, send_refusal

_NO_UPGRADE: Final = Refusal(
    426,
    "upgrade_not_served",
    "Of other protocols only WebSocket is served, and at /v1/realtime only; send this without"
    " Upgrade.",
)
_BODY_HEADERS: Final = frozenset((b"content-length", b"transfer-encoding"))
_NO_HTTP: Final = Refusal(400, "invalid_http", "This is not a request in HTTP/1.1.")

MOST_PIPELINED: Final = 4
"""Reading stops while so many requests wait for the response of another one."""

SEND_TIMEOUT = "kvelastic.send_timeout"
"""Key of the `state` in a request's ASGI scope, which copies of the scope share: its connection was
cut because its client did not read."""


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with the bounds of connections, which its maker sets."""

    connections: Connections
    max_header_bytes: int
    header_timeout_s: float
    origins: Callable[[], Origins]
    """Returns the accepted origins, which a reload replaces."""


class _BoundedProtocol(HttpToolsProtocol):
    config: ServerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._in_headers = False
        self._is_over = False
        self._is_deaf = False
        """True if further input is ignored; responses are still sent."""
        self._upgrades = False
        """True if the current request is a WebSocket handshake that is served."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._earlier: deque[RequestResponseCycle] = deque()
        """Requests before the current one without a whole response, in order."""
        self._state = ConnectionState.SERVED

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._state = self.config.connections.enter(self)
        if self._state is ConnectionState.CLOSED:
            transport.abort()
            return
        self._start_timer()

    def cut(self) -> None:
        """Abort the connection, because its client does not read. Call it in the event loop."""
        for cycle in (*self._earlier, self.cycle):
            if cycle is not None:
                cycle.scope["state"][SEND_TIMEOUT] = True
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.config.connections.leave(self)
        self._stop_timer()
        waiting = [cycle for cycle, _ in self.pipeline]
        super().connection_lost(exc)
        for cycle in (*self._earlier, *waiting):
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        self._earlier.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_over or self._is_deaf:
            return
        super().data_received(data)
        if self.parser is None or self._is_over:
            return
        if self._in_headers:
            # The parser buffers incomplete lines, so count all received bytes.
            self._count(len(data))
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(
                    self.config.header_timeout_s, self._too_late
                )
        elif self.timeout_keep_alive_task is None and self._is_idle:
            # If a request got its response early, its remaining bytes stop uvicorn's timer. Without
            # a new timer the connection would stay open forever.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _is_idle(self) -> bool:
        """True if no response is pending and no headers are expected."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and self._header_timer is None and not self.transport.is_closing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._in_headers and not self._is_over:  # a trailer is no header (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        if self._state is not ConnectionState.SERVED:
            self._end(_too_many(self.config.connections.most))
        if self._is_over:
            return
        previous = self.cycle
        if self.parser.should_upgrade():
            self._upgrades = self._is_websocket
            if self._upgrades:
                super().on_headers_complete()
            else:
                self._refuse_upgrade()
        else:
            super().on_headers_complete()
        while self._earlier and self._earlier[0].response_complete:
            self._earlier.popleft()
        if previous is not None and not previous.response_complete:
            self._earlier.append(previous)
            if len(self._earlier) < MOST_PIPELINED:
                # uvicorn has paused reading, and would not see that the client disconnects.
                self.flow.resume_reading()

    @property
    def _is_websocket(self) -> bool:
        """True for a valid handshake at a WebSocket path, without a pending earlier response."""
        path = self.url.partition(b"?")[0].decode("latin-1")
        is_free = self.cycle is None or self.cycle.response_complete
        is_get = self.parser.get_method() == b"GET" and self.parser.get_http_version() == "1.1"
        has_body = any(name in _BODY_HEADERS for name, _ in self.headers)
        is_asked = is_get and not has_body and self._get_upgrade() == b"websocket"
        return is_free and is_asked and is_realtime(path)

    def _should_upgrade(self) -> bool:
        return self._upgrades

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to the WebSocket protocol, which then counts it."""
        self._is_over = True  # no timer of HTTP may close it
        self.config.connections.leave(self)
        super().handle_websocket_upgrade()

    def _refuse_upgrade(self) -> None:
        """Refuse in pipeline order. Ignore further input: a body would be parsed as requests."""
        self._is_deaf = True
        app, self.app = self.app, _upgrade_refused
        try:
            super().on_headers_complete()
        finally:
            self.app = app
        self.cycle.keep_alive = False

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing. uvicorn would advise to install a WebSocket library."""

    def send_400_response(self, _: str) -> None:
        """Refuse malformed HTTP with JSON. uvicorn calls this after an error of the parser."""
        self._end(_NO_HTTP)

    def on_body(self, body: bytes) -> None:
        if not self._is_over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_over:
            super().on_message_complete()

    def _count(self, count: int) -> None:
        self._header_bytes += count
        if self._header_bytes > self.config.max_header_bytes and not self._is_over:
            self._end(Refusal(431, "headers_too_large", "The headers are too large."))

    def _too_late(self) -> None:
        self._header_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self._end(Refusal(408, "request_timeout", "No whole request came in time."))

    def _end(self, refusal: Refusal) -> None:
        self._is_over = True
        if self.transport.is_closing():
            return
        if self._can_answer:
            url: bytes = getattr(self, "url", b"")  # uvicorn has none before the first request
            path = url.partition(b"?")[0].decode("latin-1")
            headers, body = refusal_parts(refusal, path)
            headers += self.config.origins().cors(self.headers or [])
            head = b"HTTP/1.1 %d \r\nconnection: close\r\n" % refusal.status
            lines = b"".join(b"%s: %s\r\n" % header for header in headers)
            self.transport.write(head + lines + b"\r\n" + body)
            if self.cycle is not None:  # the application must not send more
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        self.transport.close()

    @property
    def _can_answer(self) -> bool:
        """True if a refusal can be sent now: no earlier response is pending."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        is_refused = cycle.more_body and not self._in_headers
        is_first = all(each.response_complete for each in self._earlier)
        return is_refused and is_first and not cycle.response_started

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.config.header_timeout_s, self._too_late)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


BoundedProtocol: Final = _BoundedProtocol
"""The protocol of one connection, for `ServerConfig`."""


def _too_many(most: int) -> Refusal:
    return Refusal(
        503,
        "too_many_connections",
        f"The controller serves {most} connections already, as many as its limit of open files"
        " allows; try again later.",
        retry_after_s=1.0,
    )


async def _upgrade_refused(scope: Any, _receive: Any, send: Any) -> None:
    await send_refusal(send, _NO_UPGRADE, scope["path"])
