"""A request's body: read within bounds, and kept until it is sent to the engine.

A small body is kept as bytes. A large one is written in pieces to an anonymous memory file
(memfd_create) and sent from there in pieces. Joining, copying or sending 64 MiB in one step would
stall the loop. Another process can read such a file too (`body_reader`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from kvelastic.controller.http.refusal import Refusal

Receive = Callable[[], Awaitable[Any]]

SMALL_BYTES: Final = 1 << 20
"""A larger body is kept in a memory file."""
_PIECE_BYTES: Final = 256 << 10


class ClientGoneError(Exception):
    """The client disconnected before its request was complete."""


class BodyBudget:
    """Bounds the bytes of all bodies that are held at the same time."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, count: int) -> None:
        """Reserve `count` bytes. Raises `Refusal` (503) if that exceeds the limit."""
        if self.held_bytes + count > self.limit_bytes:
            raise _full("as many requests as server.max_buffered allows")
        self.held_bytes += count

    def give(self, count: int) -> None:
        """Release `count` bytes."""
        self.held_bytes -= count


class Body:
    """One request's body. Its reader must call `release`, which is idempotent.

    Use it in the event loop. No method waits, but `pieces` and `to_file` copy.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held_bytes = 0
        self._pieces: list[bytes] = []
        self._file: int | None = None
        """Holds a large body, instead of `_pieces`."""
        self._size = 0
        """Number of bytes in `_pieces` or in the file."""
        self._replaced = (0, 0, b"")
        """Sent instead of the file's bytes between two positions."""
        self._added = b""
        """Sent before the last brace."""

    @property
    def size(self) -> int:
        """Number of bytes that are sent to an engine."""
        start, end, new = self._replaced
        return self._size - (end - start) + len(new) + len(self._added)

    @property
    def in_memory(self) -> bytes | None:
        """The whole body if it is small; None if it is in a file."""
        if self._file is not None:
            return None
        return b"".join(self.pieces()) if self._added else self._bytes(0, self._size)

    def append(self, piece: bytes) -> None:
        """Append the next piece. Raises `Refusal` (503)."""
        self._take(len(piece))
        if self._file is None and self._held_bytes > SMALL_BYTES:
            self.to_file()
        if self._file is None:
            self._pieces.append(piece)
            self._size += len(piece)
        else:
            self._write(piece)

    def begins_with(self, start: bytes) -> bool:
        """Return True if the body begins with `start`, ignoring leading white space."""
        return self._bytes(0, 256).lstrip(b" \t\r\n").startswith(start)

    def to_file(self) -> int:
        """Return the descriptor of its file, moving it there if needed. Raises `Refusal` (503)."""
        if self._file is None:
            try:
                self._file = os.memfd_create("kvelastic-body", os.MFD_CLOEXEC)
            except OSError as error:
                raise _full(f"as many bodies as it can ({error.strerror})") from None
            pieces, self._pieces, self._size = self._pieces, [], 0
            for piece in pieces:
                self._write(piece)
        return self._file

    def take_written(self) -> None:
        """Account for bytes that another process wrote to its file. Raises `Refusal` (503)."""
        self._size = os.fstat(self.to_file()).st_size
        self._take(self._size)

    def replace(self, start: int, end: int, new: bytes) -> None:
        """Replace the bytes `start` to `end` by `new`. Call it at most once, before `add_fields`.

        Raises `Refusal` (503).
        """
        self._take(max(0, len(new) - (end - start)))
        if self._file is not None:
            self._replaced = start, end, new
            return
        data = self._bytes(0, self._size)
        self._pieces = [b"".join((data[:start], new, data[end:]))]
        self._size = len(self._pieces[0])

    def add_fields(self, fields: bytes) -> None:
        """Add fields to the body, a JSON object that has one: `"a":1,"b":2`.

        Engines take the last of several values of a field, so these take effect. Another call
        replaces them. Raises `Refusal` (503).
        """
        added = b"," + fields
        self._take(len(added) - len(self._added))
        self._added = added

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes to send, in pieces of up to 256 KiB. Raises `OSError` after `release`."""
        start, end, new = self._replaced
        last = self._last_brace() if self._added else self._size
        yield from self._read(0, start)
        if new:
            yield new
        yield from self._read(end, last)
        if self._added:
            yield self._added
            yield from self._read(last, self._size)

    def release(self) -> None:
        """Release its memory and budget. Idempotent."""
        self._take(-self._held_bytes)
        self._pieces, self._added = [], b""
        if self._file is None:
            self._size = 0
        elif self._file >= 0:
            os.close(self._file)
            self._file = -1  # a late read fails instead of reading a file that reuses the number

    def _take(self, count: int) -> None:
        if count > 0:
            self._budget.take(count)
        else:
            self._budget.give(-count)
        self._held_bytes += count

    def _write(self, piece: bytes) -> None:
        assert self._file is not None
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise _full(f"as many bodies as there is memory for ({error.strerror})") from None
        self._size += len(piece)

    def _last_brace(self) -> int:
        end = self._size
        while end:
            start = max(0, end - _PIECE_BYTES)
            found = self._bytes(start, end).rfind(b"}")
            if found >= 0:
                return start + found
            end = start
        raise OSError("the body has no object")

    def _read(self, start: int, end: int) -> Iterator[bytes]:
        most_bytes = self._size if self._file is None else _PIECE_BYTES
        while start < end:
            piece = self._bytes(start, min(start + most_bytes, end))
            if not piece:
                raise OSError("the body's file is shorter than it was")
            start += len(piece)
            yield piece

    def _bytes(self, start: int, end: int) -> bytes:
        if self._file is not None:
            return os.pread(self._file, end - start, start)
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0][start:end] if self._pieces else b""


class Upload(aiohttp.Payload):
    """aiohttp's payload of a body in a file. Releases the body when all of it is sent."""

    def __init__(self, body: Body, *, keeps_body: bool = False) -> None:
        """With `keeps_body` it is not released: it is sent again."""
        super().__init__(body)
        self._body = body
        self._keeps_body = keeps_body
        self._size = body.size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Raise `TypeError`: a body has no text."""
        raise TypeError("a body is not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send the body in pieces. Waits for a slow engine."""
        for piece in self._body.pieces():
            await writer.write(piece)
        self._consumed = True
        if not self._keeps_body:
            self._body.release()


async def read_body(
    receive: Receive, declared: bytes | None, limit_bytes: int, timeout_s: float, budget: BodyBudget
) -> Body:
    """Read the whole body; the caller releases it.

    `declared` is the Content-Length header. `timeout_s` bounds the wait for each piece. Raises
    `Refusal` (413 too large, 408 too slow, 503 no budget) or `ClientGoneError`.
    """
    if declared is not None and declared.isdigit() and int(declared[:20]) > limit_bytes:
        raise _too_large(limit_bytes)
    body = Body(budget)
    size = 0
    is_late = False
    task = asyncio.current_task()

    def late() -> None:
        nonlocal is_late
        is_late = True
        if task is not None:
            task.cancel()

    loop = asyncio.get_running_loop()
    # asyncio.wait_for would start a task for every request.
    timer = loop.call_later(timeout_s, late)
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            piece = message.get("body", b"")
            if piece:
                size += len(piece)
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                body.append(piece)
            if not message.get("more_body", False):
                return body
            timer.cancel()
            timer = loop.call_later(timeout_s, late)
    except asyncio.CancelledError:
        body.release()
        if not is_late:
            raise
        if task is not None and hasattr(task, "uncancel"):
            task.uncancel()
        raise Refusal(
            408, "request_timeout", f"No piece of the body came for {timeout_s:g} s."
        ) from None
    except BaseException:
        body.release()
        raise
    finally:
        timer.cancel()


def _too_large(limit_bytes: int) -> Refusal:
    return Refusal(
        413, "body_too_large", f"The body is larger than {limit_bytes} bytes (server.max_body)."
    )


def _full(held: str) -> Refusal:
    return Refusal(
        503, "controller_full", f"The controller holds {held}; try again.", retry_after_s=1.0
    )
