"""The programs of the router benchmark: `engine`, `bare` (a proxy with nothing in it), `load`.

python programs.py engine PORT | bare PORT ENGINE_PORT | load PORT SECONDS CLIENTS plain|stream
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

CHUNKS = 64
PLAIN = json.dumps({"id": "x", "choices": [{"text": "hello " * 8}]}).encode()
EVENT = b'data: {"choices":[{"index":0,"text":"tok"}]}\n\n'


class Engine(asyncio.Protocol):
    """As fast as Python answers: no parser to speak of. A body that has `stream` gets a stream."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length: ")
            size = int(head[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + size:
                return
            body = self.buffer[end + 4 : end + 4 + size]
            self.buffer = self.buffer[end + 4 + size :]
            if b'"stream": true' in body:
                asyncio.get_running_loop().create_task(self.stream())
            else:
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%s" % (len(PLAIN), PLAIN)
                )

    async def stream(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
        for _ in range(CHUNKS):
            self.transport.write(chunk)
            await asyncio.sleep(0)
        self.transport.write(b"0\r\n\r\n")


class Load(asyncio.Protocol):
    """One client: a request after another; `first_s` and `done` are shared by all of them."""

    def __init__(self, request: bytes, end_s: float, first_s: list[float], done: list[int]) -> None:
        self.request, self.end_s, self.first_s, self.done = request, end_s, first_s, done
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.began_s, self.answer, self.is_first = time.perf_counter(), b"", True
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.answer += data
        head, found, body = self.answer.partition(b"\r\n\r\n")
        if not found:
            return
        if self.is_first and body:
            self.first_s.append(time.perf_counter() - self.began_s)
            self.is_first = False
        if b"chunked" in head:
            if not body.endswith(b"0\r\n\r\n"):
                return
        elif len(body) < len(PLAIN):
            return
        assert head.startswith(b"HTTP/1.1 200"), head
        self.done[0] += 1
        if time.perf_counter() < self.end_s:
            self.ask()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def engine(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


async def load(port: int, seconds: float, clients: int, kind: str) -> None:
    body = {"model": "m", "prompt": "hello", "stream": kind == "stream"}
    raw = json.dumps(body).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(raw), raw)
    )
    first_s: list[float] = []
    done = [0]
    began_s = time.perf_counter()
    loop = asyncio.get_running_loop()
    all_of_them = [
        await loop.create_connection(
            lambda: Load(request, began_s + seconds, first_s, done), "127.0.0.1", port
        )
        for _ in range(clients)
    ]
    await asyncio.gather(*(protocol.over for _, protocol in all_of_them))
    took_s = time.perf_counter() - began_s
    first_s.sort()
    print(
        json.dumps(
            {
                "per_s": done[0] / took_s,
                "p50_ms": first_s[len(first_s) // 2] * 1e3,
                "p99_ms": first_s[int(len(first_s) * 0.99)] * 1e3,
            }
        )
    )


def bare(port: int, engine_port: int) -> None:
    """Starlette, uvicorn and aiohttp's client, nothing else: the controller is held against it."""
    import aiohttp
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    session: list[aiohttp.ClientSession] = []

    async def proxy(request: Request) -> StreamingResponse:
        if not session:
            connector = aiohttp.TCPConnector(limit=0)
            session.append(aiohttp.ClientSession(connector=connector, auto_decompress=False))
        body = await request.body()
        answer = await session[0].post(
            f"http://127.0.0.1:{engine_port}{request.url.path}",
            data=body,
            headers={"content-type": "application/json"},
        )
        headers = {
            key: value
            for key, value in answer.headers.items()
            if key.lower() in {"content-type", "content-length"}
        }

        async def pieces():  # type: ignore[no-untyped-def]
            async for piece in answer.content.iter_any():
                yield piece
            answer.release()

        return StreamingResponse(pieces(), answer.status, headers)

    app = Starlette(routes=[Route("/v1/completions", proxy, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="error", access_log=False)


if __name__ == "__main__":
    import uvloop

    verb, *rest = sys.argv[1:]
    if verb == "engine":
        uvloop.run(engine(int(rest[0])))
    elif verb == "bare":
        bare(int(rest[0]), int(rest[1]))
    else:
        uvloop.run(load(int(rest[0]), float(rest[1]), int(rest[2]), rest[3]))
