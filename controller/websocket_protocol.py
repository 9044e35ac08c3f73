"""uvicorn's WebSocket protocol with the bounds that it lacks: on places, pieces, and unread pongs.

What it has itself: messages of at most `MESSAGE_BYTES`, no reading while one of them waits to be
taken, and pings to clients that may be gone.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from kvelastic.controller.connections import Connections

MESSAGE_BYTES: Final = 16 << 20
"""Of one message, in either direction; what vLLM takes of its own clients."""
PING_EVERY_S: Final = 20.0
CLOSE_S: Final = 2.0
"""For a client to take part in a close."""
MOST_FRAGMENTS: Final = 1 << 14
"""Of one message: they may be empty, and each is an object here."""
MOST_UNREAD_BYTES: Final = 1 << 20
"""Of what a client has not taken while it goes on sending pings."""


def bounded_websocket(connections: Connections) -> type[asyncio.Protocol]:
    """A protocol class for `uvicorn.Config(ws=...)`."""
    return type("BoundedWebSocket", (_BoundedWebSocket,), {"counted_in": connections})


class _BoundedWebSocket(WebSocketsSansIOProtocol):
    counted_in: ClassVar[Connections]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = CLOSE_S

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.counted_in.enter(self)  # in the place of its HTTP connection, which has just left

    def connection_lost(self, exc: Exception | None) -> None:
        self.counted_in.leave(self)
        super().connection_lost(exc)

    def cut(self) -> None:
        """End it now. Called in the loop, when the client takes nothing of what it is sent."""
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
