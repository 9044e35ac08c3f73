"""uvicorn's WebSocket protocol with more bounds: on connections, fragments, and unread pongs.

uvicorn itself bounds a message to `MESSAGE_BYTES`, stops reading while a message is pending, and
pings clients to detect lost connections.
"""

from __future__ import annotations

from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from kvelastic.controller.http.http_protocol import ServerConfig

MESSAGE_BYTES: Final = 16 << 20
"""Maximum size of one message in either direction, equal to vLLM's own limit."""
PING_EVERY_S: Final = 20.0
CLOSE_S: Final = 2.0
"""Timeout of the close handshake with a client."""
MOST_FRAGMENTS: Final = 1 << 14
"""Maximum number of fragments per message. They may be empty, and each is a Python object."""
MOST_UNREAD_BYTES: Final = 1 << 20
"""Maximum of unread data to a client that keeps sending pings."""


class _BoundedWebSocket(WebSocketsSansIOProtocol):
    config: ServerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = CLOSE_S

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.config.connections.enter(self)  # its HTTP connection has just left, so there is room

    def connection_lost(self, exc: Exception | None) -> None:
        self.config.connections.leave(self)
        super().connection_lost(exc)

    def cut(self) -> None:
        """Abort the connection, because its client does not read. Call it in the event loop."""
        self.transport.abort()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MOST_FRAGMENTS:
            self.cut()
            return
        super().handle_cont(event)

    def handle_ping(self) -> None:
        if self.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            self.cut()
            return
        super().handle_ping()


BoundedWebSocket: Final = _BoundedWebSocket
"""The protocol of one WebSocket, for `ServerConfig`."""
