"""The fast fake engine: `python -m benchmarks.router.engine PORT`.

It answers as fast as Python can, with no parser to speak of. What a request wants stands in the
path's query: `chunks=64` makes it a stream of so many events, `pace_ms=10` puts time between them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

PLAIN = json.dumps({"id": "x", "choices": [{"text": "hello " * 8}]}).encode()
EVENT = b'data: {"choices":[{"index":0,"text":"tok"}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(PLAIN)
) + PLAIN
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer, self.head = transport, b"", b""
        self.awaited_bytes = 0
        """Of the body; it is counted and thrown away, however large it is."""

    def data_received(self, data: bytes) -> None:
        while data:
            if not self.head:
                data = self.buffer + data
                end = data.find(b"\r\n\r\n")
                if end < 0:
                    self.buffer = data
                    return
                self.head, data, self.buffer = data[:end].lower(), data[end + 4 :], b""
                at = self.head.find(b"content-length: ")
                if at >= 0:
                    self.awaited_bytes = int(self.head[at + 16 :].split(b"\r\n", 1)[0])
            taken = min(self.awaited_bytes, len(data))
            self.awaited_bytes -= taken
            data = data[taken:]
            if not self.awaited_bytes:
                self.answer(self.head.split(b" ", 2)[1])
                self.head = b""

    def answer(self, target: bytes) -> None:
        if b"chunks=" in target:
            chunks, pace_ms = (_number(target, key) for key in (b"chunks=", b"pace_ms="))
            asyncio.get_running_loop().create_task(self.stream(chunks, pace_ms / 1000))
        else:
            self.transport.write(ANSWER)

    async def stream(self, chunks: int, pace_s: float) -> None:
        self.transport.write(STREAM_HEAD)
        for _ in range(chunks):
            self.transport.write(CHUNK)
            await asyncio.sleep(pace_s)  # 0 lets the other streams have their turn
        self.transport.write(STREAM_END)


def _number(target: bytes, key: bytes) -> int:
    return int(target.partition(key)[2].partition(b"&")[0] or 0)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1])))
