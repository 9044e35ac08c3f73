"""Commands as kvcached sends them: pickled, with their length before, over Unix sockets.

kvcached connects once for every message, in a coroutine a worker under `asyncio.run`, and the
worker takes one connection after another. Beside it the same messages over sockets that stay open.
Written from the description of its protocol; no code of its runs here.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

COMMAND = {"cmd": "map_to_kv_tensors", "offsets": [1 << 21]}
ANSWER = {"status": "success"}
_LENGTH = struct.Struct("!I")


def _packed(message: dict[str, Any]) -> bytes:
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def _exactly(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = connection.recv(count - len(got))
        if not more:
            raise EOFError
        got += more
    return got


def _receive(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def serve_connection(connection: socket.socket) -> None:
    """Answers every message until the other end is closed."""
    try:
        while True:
            _receive(connection)
            connection.sendall(_packed(ANSWER))
    except EOFError:
        connection.close()


def serve_listener(listener: socket.socket) -> None:
    """Answers one message a connection, for ever."""
    while True:
        connection, _ = listener.accept()
        with connection:
            _receive(connection)
            connection.sendall(_packed(ANSWER))


def ask_open(connections: Sequence[socket.socket]) -> None:
    """All are asked, then all are heard."""
    for connection in connections:
        connection.sendall(_packed(COMMAND))
    for connection in connections:
        assert _receive(connection) == ANSWER


async def _ask(path: str) -> Any:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(_packed(COMMAND))
        await writer.drain()
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    finally:
        writer.close()
        await writer.wait_closed()


async def _ask_all(paths: Sequence[str]) -> None:
    for answer in await asyncio.gather(*(_ask(path) for path in paths)):
        assert answer == ANSWER


def ask_as_kvcached(paths: Sequence[str]) -> None:
    """A connection a worker, all at once."""
    asyncio.run(_ask_all(paths))
