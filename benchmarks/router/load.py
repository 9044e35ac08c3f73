"""The load: `python -m benchmarks.router.load PORT '{"clients": 32, "seconds": 4, ...}'`.

Closed: each of the clients asks again as soon as it has its answer. Open (`rate_per_s`): requests
come at random moments of a fixed rate, whatever the answers do; one that finds no client free
waits, and its time counts from the moment it came. Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import deque
from typing import Any

from benchmarks.router.engine import EVENT, PLAIN, STREAM_END

BODY = json.dumps(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "Tell me of the sea. " * 20}],
        "temperature": 0.7,
        "max_tokens": 64,
        "stream": True,
    }
).encode()


class Load:
    """All clients of a run, and what they have seen."""

    def __init__(self, port: int, plan: dict[str, Any]) -> None:
        self.port = port
        self.clients: int = plan["clients"]
        self.seconds: float = plan["seconds"]
        self.rate_per_s: float = plan.get("rate_per_s", 0.0)
        self.begin_over_s: float = plan.get("begin_over_s", 0.0)
        self.chunks: int = plan.get("chunks", 0)
        query = f"?chunks={self.chunks}&pace_ms={plan.get('pace_ms', 0)}" if self.chunks else ""
        self.request = (
            f"POST {plan.get('prefix', '')}/v1/chat/completions{query} HTTP/1.1\r\n"
            f"host: 127.0.0.1:{port}\r\n"
            "user-agent: benchmark\r\naccept: */*\r\naccept-encoding: gzip, deflate\r\n"
            f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
        ).encode() + BODY
        self.first_s: list[float] = []
        self.answers = 0
        self.end_s = 0.0
        self.free: deque[Client] = deque()
        self.due: deque[float] = deque()
        self.running = 0
        self.failed: str | None = None
        self.over = asyncio.Event()

    async def run(self) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        made = [
            await loop.create_connection(lambda: Client(self), "127.0.0.1", self.port)
            for _ in range(self.clients)
        ]
        clients = [client for _, client in made]
        began_s = time.perf_counter()
        self.end_s = began_s + self.seconds
        if self.rate_per_s:
            self.free.extend(clients)
            await self.arrivals(began_s)
            self.end_s = time.perf_counter()
        else:
            for client in clients:
                client.ask(time.perf_counter())
                # Streams that take the same time would else begin anew all at once, for ever.
                await asyncio.sleep(self.begin_over_s / self.clients)
        if self.running:
            await asyncio.wait_for(self.over.wait(), self.seconds + 60)
        if self.failed:
            raise SystemExit(self.failed)
        took_s = time.perf_counter() - began_s
        first_ms = sorted(each * 1e3 for each in self.first_s)
        return {
            "answers": self.answers,
            "answers_per_s": self.answers / took_s,
            "chunks_per_s": self.answers * self.chunks / took_s,
            "p50_ms": first_ms[len(first_ms) // 2],
            "p99_ms": first_ms[int(len(first_ms) * 0.99)],
        }

    async def arrivals(self, began_s: float) -> None:
        dice = random.Random(7)
        at_s = began_s
        while (at_s := at_s + dice.expovariate(self.rate_per_s)) < self.end_s:
            wait_s = at_s - time.perf_counter()
            if wait_s > 0:
                # The loop's timers have a grain of a millisecond: the time counts from the moment
                # that it is really sent, unless it is late for want of a free client.
                await asyncio.sleep(wait_s)
                at_sent_s = time.perf_counter()
            else:
                await asyncio.sleep(0)
                at_sent_s = at_s if not self.free else time.perf_counter()
            if self.free:
                self.free.popleft().ask(at_sent_s)
            else:
                self.due.append(at_sent_s)

    def answered(self, client: Client) -> None:
        self.answers += 1
        if not self.rate_per_s:
            if time.perf_counter() < self.end_s:
                client.ask(time.perf_counter())
        elif self.due:
            client.ask(self.due.popleft())
        else:
            self.free.append(client)
        if not self.running and time.perf_counter() >= self.end_s:
            self.over.set()

    def fail(self, why: str) -> None:
        self.failed = self.failed or why
        self.over.set()


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.is_asking = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, began_s: float) -> None:
        self.began_s = began_s
        self.pieces: list[bytes] = []
        self.size = 0
        self.body_at = -1
        self.is_asking = True
        self.load.running += 1
        self.transport.write(self.load.request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.size += len(data)
        if self.body_at < 0:
            whole = b"".join(self.pieces)
            end = whole.find(b"\r\n\r\n")
            if end < 0 or len(whole) == end + 4:
                return
            self.load.first_s.append(time.perf_counter() - self.began_s)
            self.body_at = end + 4
            if not whole.startswith(b"HTTP/1.1 200"):
                self.load.fail(f"an answer that is not 200: {whole[:200]!r}")
        if self.load.chunks:
            tail = data if len(data) >= len(STREAM_END) else b"".join(self.pieces[-6:])
            if not tail.endswith(STREAM_END):
                return
            if b"".join(self.pieces).count(EVENT[:6]) != self.load.chunks:
                self.load.fail("a stream that is not whole")
        elif self.size < self.body_at + len(PLAIN):
            return
        self.is_asking = False
        self.load.running -= 1
        self.load.answered(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_asking:
            self.load.fail("a connection was lost in the middle of an answer")


async def main() -> None:
    print(json.dumps(await Load(int(sys.argv[1]), json.loads(sys.argv[2])).run()))


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
