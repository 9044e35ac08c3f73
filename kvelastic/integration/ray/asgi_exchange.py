"""One request to an ASGI application in the same process, and the pieces of its response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvelastic.controller.http.headers import Headers
from kvelastic.integration.ray.messages import EngineRequest

MOST_WAITING_BYTES: Final = 1 << 20
"""Response bytes that may be buffered before the application has to wait for the reader."""
_END_S: Final = 5.0


class AsgiExchange:
    """Starts the request in a task of the running loop. The caller must always await `end`."""

    def __init__(
        self, app: Callable[[Any, Any, Any], Awaitable[None]], request: EngineRequest
    ) -> None:
        self.status = 0
        """Status of the response; 0 before it has started."""
        self.headers: Headers = []
        self.is_whole = False
        """True if the response is complete."""
        self._body: bytes | None = request.body
        self._waiting = bytearray()
        self._has_news = asyncio.Event()
        self._was_taken = asyncio.Event()
        self._is_gone = asyncio.Event()
        self._task: asyncio.Future[None] = asyncio.ensure_future(
            app(_scope(request), self._receive, self._send)
        )
        self._task.add_done_callback(lambda _: self._has_news.set())

    async def next_piece(self) -> bytes:
        """Return all bytes since the last call, waiting for some; empty at the response's end.

        Raises the application's exception.
        """
        while not self._waiting and not self.is_whole and not self._task.done():
            self._has_news.clear()
            await self._has_news.wait()
        if not self._waiting and self._task.done() and not self._task.cancelled():
            self._task.result()
        piece = bytes(self._waiting)
        self._waiting.clear()
        self._was_taken.set()
        return piece

    async def end(self) -> None:
        """Report a disconnected client to the application and wait up to 5 s, then cancel it."""
        self._is_gone.set()
        self._was_taken.set()
        _, left = await asyncio.wait({self._task}, timeout=_END_S)
        for task in left:
            task.cancel()

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(bytes(name), bytes(value)) for name, value in message["headers"]]
            return
        self._waiting += message.get("body", b"")
        self.is_whole = not message.get("more_body", False)
        self._has_news.set()
        while len(self._waiting) > MOST_WAITING_BYTES and not self._is_gone.is_set():
            self._was_taken.clear()
            await self._was_taken.wait()


def _scope(request: EngineRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": None,
        "server": ("127.0.0.1", 0),
    }
