"""The bare proxy: `python -m benchmarks.router.bare PORT ENGINE_PORT`.

Starlette, uvicorn (uvloop, httptools, one worker) and aiohttp's client, and what any proxy has to
do: the body and the headers go on, status, headers and body come back, the body piece by piece as
it comes, and the upstream request ends when its client goes. No model is looked for, nothing is
checked, counted or logged.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

NOT_FORWARDED = {"host", "content-length", "connection", "transfer-encoding", "keep-alive"}


def application(engine_port: int) -> Starlette:
    sessions: list[aiohttp.ClientSession] = []

    async def proxy(request: Request) -> StreamingResponse:
        if not sessions:
            sessions.append(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0),
                    auto_decompress=False,
                    timeout=aiohttp.ClientTimeout(total=None),
                )
            )
        target = f"http://127.0.0.1:{engine_port}{request.url.path}"
        if request.url.query:
            target += "?" + request.url.query
        answer = await sessions[0].request(
            request.method,
            target,
            data=await request.body(),
            headers=[(k, v) for k, v in request.headers.items() if k not in NOT_FORWARDED],
        )
        length = {k: v for k, v in answer.headers.items() if k.lower() == "content-length"}
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in NOT_FORWARDED}

        async def pieces() -> AsyncIterator[bytes]:
            async with answer:
                async for piece in answer.content.iter_any():
                    yield piece

        return StreamingResponse(pieces(), answer.status, headers | length)

    return Starlette(routes=[Route("/{path:path}", proxy, methods=["GET", "POST"])])


if __name__ == "__main__":
    uvicorn.run(
        application(int(sys.argv[2])),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
    )
