"""A fake engine: an OpenAI-compatible server with the sleep routes of vLLM or SGLang, as a program.

    python tests/fakes/engine.py --kind vllm --port 0 --model m     # prints `ready PORT`

It is strict: a request for another model is 404, one that comes while it sleeps is 500, a sleep
with work in flight is 500, and all of them are counted. What a request is to meet stands in its own
body under `fake`, so that tests need no other channel:

    {"model": "m", "prompt": "...", "stream": true, "max_tokens": 8,
     "fake": {"status": 429, "hang": "first" | "stream", "cut_after": 3, "reset": true,
              "first_s": 0.1, "token_s": 0.01, "hold": "NAME", "pad": 1000}}

`pad` makes each event of a stream so many bytes longer. `hold` keeps the answer's end back until
`POST /fake/release?name=NAME`: no test sleeps to catch a request in flight.
Of a chat, `deltas` are what its stream's events have, one each, and `message` is what an answer in
one piece has. A request without `fake` meets what was set by `POST /fake/set {"fake": {...}}`.
`GET /fake/state` says what it saw. `POST /fake/say {"lines": 3, "text": "x"}` writes lines to its
output. `POST /fake/close_port` closes its port and keeps its connections. `POST /fake/set` changes
the defaults below, `POST /fake/reset` undoes that and forgets what was counted.

Keys are guarded as the real ones do it. With VLLM_API_KEY in its environment, or `--api-key`, the
fake of vLLM answers 401 to other keys under /v1; with `--api-key` that of SGLang does everywhere
but at /health and /metrics.

A request with `kv_transfer_params` is one part of two, as vLLM's connectors have them, and 400 if
it is anything else: a prompt for one token, whose answer has a ticket (none with `"ticket": false`
under `fake`), or a request with a ticket that no earlier one had.

With `--instance` it begins by opening a real instance (`tests/programs/ledger_instance.py`, which
has its environment's KVELASTIC_* variables), and ends with 3 where the ledger refuses that.

It dies with who has started it, however that dies. With `--outlives-its-parent` it dies with the
test run instead (PID_OF_TEST_RUN, a pid): an orphan for tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from aiohttp import web
from mortal import die_with_parent


class FakeEngine:
    def __init__(self, kind: str, model: str, slow_start_s: float, key: str | None) -> None:
        self.kind = kind
        self.key = key
        self.model = model
        self.asleep = False
        self.slow_start_s = slow_start_s
        self.in_flight = 0
        self.counts: dict[str, int] = {}
        self.last_headers: list[list[str]] = []
        self.last_body = ""
        self.last_path = ""
        self.tickets: list[dict[str, Any]] = []
        self.used: list[dict[str, Any]] = []
        self.holds: dict[str, asyncio.Event] = {}
        self.waiters: dict[str, asyncio.Event] = {}
        self.settings = self.first_settings()
        self.site: web.TCPSite | None = None

    @staticmethod
    def first_settings() -> dict[str, Any]:
        return {
            "sleep_status": 200,
            "wake_status": 200,
            "sleep_s": 0.0,
            "wake_s": 0.0,
            "wake_hold": "",
            "sleep_hold": "",
            "health_status": 200,
            "cors": "",
            "realtime_status": 200,
            "fake": {},
        }

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def hold(self, name: str) -> asyncio.Event:
        return self.holds.setdefault(name, asyncio.Event())

    def application(self) -> web.Application:
        app = web.Application(client_max_size=256 << 20, middlewares=[self.watch])
        add = app.router.add_route
        add("GET", "/health", self.health)
        add("GET", "/v1/models", self.models)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
            add("POST", path, self.generate)
        add("POST", "/v1/embeddings", self.embed)
        add("GET", "/v1/realtime", self.realtime)
        add("GET", "/fake/state", self.state)
        add("POST", "/fake/release", self.release)
        add("POST", "/fake/set", self.change)
        add("POST", "/fake/say", self.say)
        add("POST", "/fake/reset", self.reset)
        add("POST", "/fake/close_port", self.close_port)
        if self.kind == "vllm":
            add("POST", "/sleep", self.sleep)
            add("POST", "/wake_up", self.wake)
            add("GET", "/is_sleeping", self.is_sleeping)
        elif self.kind == "sglang":
            add("POST", "/release_memory_occupation", self.sleep)
            add("POST", "/resume_memory_occupation", self.wake)
        add("*", "/{rest:.*}", self.echo)
        return app

    @web.middleware
    async def watch(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith("/fake/"):
            return await handler(request)
        if self.is_guarded(request):
            self.count("refused_keys")
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path not in {"/health", "/is_sleeping"}:
            self.last_headers = [[k, v] for k, v in request.headers.items()]
            self.last_path = request.raw_path
        return await handler(request)

    def is_guarded(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization")
        if self.key is None or request.method == "OPTIONS" or given == f"Bearer {self.key}":
            return False
        if self.kind == "sglang":
            return not request.path.startswith(("/health", "/metrics"))
        return request.path.startswith("/v1")

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.settings["health_status"])

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def state(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "pid": os.getpid(),
                "asleep": self.asleep,
                "in_flight": self.in_flight,
                "counts": self.counts,
                "headers": self.last_headers,
                "body": self.last_body,
                "path": self.last_path,
                "tickets": self.tickets,
                "used": self.used,
                "held": [name for name, event in self.holds.items() if not event.is_set()],
            }
        )

    async def release(self, request: web.Request) -> web.Response:
        self.hold(request.query["name"]).set()
        return web.Response()

    async def change(self, request: web.Request) -> web.Response:
        self.settings.update(await request.json())
        return web.Response()

    async def say(self, request: web.Request) -> web.Response:
        """Write lines, as an engine's log has them; they have been written when it answers."""
        asked = await request.json()
        for number in range(asked["lines"]):
            print(asked["text"], number)
        sys.stdout.flush()
        return web.Response()

    async def close_port(self, _: web.Request) -> web.Response:
        """Accept no connections any more and run on, as vLLM's server without its engine core."""
        assert self.site is not None
        await self.site.stop()
        return web.Response()

    async def reset(self, _: web.Request) -> web.Response:
        """As it was at its start; whatever is held back goes on."""
        for event in self.holds.values():
            event.set()
        self.holds.clear()
        self.counts.clear()
        self.tickets.clear()
        self.used.clear()
        self.asleep = False
        self.settings = self.first_settings()
        return web.Response()

    async def sleep(self, request: web.Request) -> web.Response:
        self.count("sleep_calls")
        if self.kind == "vllm" and request.query.get("level") != "1":
            return web.json_response({"error": "level"}, status=400)
        if self.in_flight:
            self.count("slept_while_busy")
            return web.json_response({"error": "busy"}, status=500)
        if self.settings["sleep_hold"]:
            await self.hold(self.settings["sleep_hold"]).wait()
        await asyncio.sleep(self.settings["sleep_s"])
        if self.settings["sleep_status"] == 200:
            self.asleep = True
        return web.Response(status=self.settings["sleep_status"])

    async def wake(self, _: web.Request) -> web.Response:
        self.count("wake_calls")
        if self.settings["wake_hold"]:
            await self.hold(self.settings["wake_hold"]).wait()
        await asyncio.sleep(self.settings["wake_s"])
        if self.settings["wake_status"] == 200:
            self.asleep = False
        return web.Response(status=self.settings["wake_status"])

    async def is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.asleep})

    async def echo(self, request: web.Request) -> web.Response:
        """Any other path: what came, in a form that shows it."""
        body = await request.read()
        self.last_body = body.decode("latin-1")
        self.count("echoed")
        return web.json_response(
            {
                "method": request.method,
                "path": request.raw_path,
                "body": body.decode("latin-1"),
            },
            headers={"X-Engine": "fake"},
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.last_body = raw.decode("utf-8", "replace")
        self.count("requests")
        if self.asleep:
            self.count("requests_while_asleep")
            return web.json_response({"error": {"message": "asleep"}}, status=500)
        self.in_flight += 1
        try:
            return await self._generate(request, json.loads(raw))
        except (asyncio.CancelledError, ConnectionError):
            self.count("cancelled")
            raise
        finally:
            self.in_flight -= 1

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fake = body.get("fake") or self.settings["fake"]
        if body.get("model") != self.model:
            error = {"message": f"The model {body.get('model')} does not exist.", "code": 404}
            return web.json_response({"error": error}, status=404)
        if fake.get("reset"):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fake.get("hang") == "first":
            await asyncio.Event().wait()
        await asyncio.sleep(fake.get("first_s", 0))
        if "status" in fake:
            headers = {"Retry-After": "7", "X-Engine": "fake"}
            error = {"message": "as asked", "type": "fake", "code": fake["status"]}
            return web.json_response({"error": error}, status=fake["status"], headers=headers)
        try:
            transfer = self.transfer(body, fake)
        except AssertionError as error:
            self.count("bad_transfers")
            return web.json_response({"error": {"message": f"{error}"}}, status=400)
        is_chat = request.path == "/v1/chat/completions"
        deltas = fake.get("deltas")
        tokens = int(body.get("max_tokens", 4)) if deltas is None else len(deltas)
        if not body.get("stream"):
            if "hold" in fake:
                await self.hold(fake["hold"]).wait()
            usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
            cors = self.settings["cors"]
            choice = {"index": 0, "text": "x " * tokens, "finish_reason": "stop"}
            if is_chat:
                message = {"role": "assistant", "content": choice.pop("text")}
                choice["message"] = message | fake.get("message", {})
            return web.json_response(
                {
                    "id": request.headers.get("x-request-id", ""),
                    "model": self.model,
                    "choices": [choice],
                    "usage": usage,
                    "kv_transfer_params": transfer,
                },
                headers={"X-Engine": "fake"}
                | ({"Access-Control-Allow-Origin": cors} if cors else {}),
            )
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Engine": "fake"}
        )
        response.enable_chunked_encoding()
        await response.prepare(request)
        for number in range(tokens):
            if number == fake.get("cut_after"):
                assert request.transport is not None
                request.transport.abort()
                return response
            if fake.get("hang") == "stream" and number == 1:
                await asyncio.Event().wait()
            if "hold" in fake and number == 1:
                await self.hold(fake["hold"]).wait()
            text = f"t{number} " + "x" * int(fake.get("pad", 0))
            said: dict[str, Any] = {"text": text}
            if is_chat:
                said = {"delta": {"content": text} if deltas is None else deltas[number]}
            await self.event(response, {"choices": [said]})
            await asyncio.sleep(fake.get("token_s", 0))
        if (body.get("stream_options") or {}).get("include_usage"):
            reason = fake.get("finish_reason", "stop")
            await self.event(response, {"choices": [{"finish_reason": reason}]})
            usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
            await self.event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def transfer(self, body: dict[str, Any], fake: dict[str, Any]) -> dict[str, Any] | None:
        """The ticket that the answer has. Raises `AssertionError` for no such part."""
        asked = body.get("kv_transfer_params")
        if asked is None:
            return None
        if asked.get("do_remote_prefill"):
            assert not asked["do_remote_decode"], "both parts in one request"
            assert asked not in self.used, "the ticket was used before"
            self.used.append(asked)
            return None
        assert asked == {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        }, asked  # fmt: skip
        assert body["max_tokens"] == 1, "a prompt for more than one token"
        assert body.get("max_completion_tokens", 1) == body.get("n", 1) == 1, "more than one"
        assert body.get("min_tokens", 0) <= 1, "min_tokens is above max_tokens"
        assert not body.get("stream"), "the ticket would not be seen"
        assert not body.get("stream_options"), "stream_options without a stream"
        if not fake.get("ticket", True):
            return None
        ticket = {"do_remote_prefill": True, "do_remote_decode": False, "id": os.urandom(8).hex()}
        self.tickets.append(ticket)
        return ticket

    @staticmethod
    async def event(response: web.StreamResponse, value: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def realtime(self, request: web.Request) -> web.StreamResponse:
        """A WebSocket that sends back what it is sent, but for texts like `{"fake": {...}}`:

        `close: 4001` ends it, `reset` and `die` without a word, `flood: 100` sends so many messages
        of 64 KiB, and `big: 1000` one of so many bytes.
        """
        self.count("websockets")
        if self.asleep:
            self.count("requests_while_asleep")
            return web.Response(status=500)
        if self.settings["realtime_status"] != 200:
            return web.Response(status=self.settings["realtime_status"])
        if request.query.get("model", self.model) != self.model:
            return web.Response(status=404)
        socket = web.WebSocketResponse(protocols=("realtime",), max_msg_size=32 << 20)
        await socket.prepare(request)
        self.in_flight += 1
        try:
            await socket.send_json({"type": "session.created"})
            async for message in socket:
                if message.type is web.WSMsgType.BINARY:
                    await socket.send_bytes(message.data)
                elif message.type is web.WSMsgType.TEXT:
                    await self.said(request, socket, message.data)
        finally:
            self.in_flight -= 1
            self.count(f"closed_{socket.close_code}")
        return socket

    async def said(self, request: web.Request, socket: web.WebSocketResponse, text: str) -> None:
        fake = json.loads(text).get("fake") if text.startswith("{") else None
        if fake is None:
            await socket.send_str(text)
        elif "close" in fake:
            await socket.close(code=fake["close"], message=b"as asked")
        elif "die" in fake:
            os._exit(9)
        elif "reset" in fake:
            assert request.transport is not None
            request.transport.abort()
        elif "big" in fake:
            await socket.send_bytes(b"x" * fake["big"])
        else:
            for _ in range(fake["flood"]):
                await socket.send_bytes(b"x" * 65536)
                self.count("flooded")

    async def embed(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "input" not in body:
            return await self.echo(request)
        self.last_body = json.dumps(body)
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [{"index": n, "embedding": [float(n), 0.5]} for n in range(len(texts))]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        return web.json_response({"data": data[::-1], "usage": usage})


def open_instance() -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "programs" / "ledger_instance.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    answer = json.loads(child.stdout.readline())
    if "error" in answer:
        print("no memory:", answer["error"], flush=True)
        sys.exit(3)
    return child


async def serve(arguments: argparse.Namespace) -> None:
    instance = open_instance() if arguments.instance else None
    if arguments.slow_start_s:
        await asyncio.sleep(arguments.slow_start_s)
    key = arguments.api_key
    if key is None and arguments.kind == "vllm":
        key = os.environ.get("VLLM_API_KEY")
    engine = FakeEngine(arguments.kind, arguments.model, arguments.slow_start_s, key)
    # A handler is cancelled when its client goes, as vLLM aborts a request then.
    runner = web.AppRunner(
        engine.application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    site = web.TCPSite(runner, arguments.host, arguments.port, backlog=4096, reuse_address=True)
    await site.start()
    engine.site = site
    port = runner.addresses[0][1]
    print("ready", port, flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if arguments.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await runner.cleanup()
    if instance is not None:
        assert instance.stdin is not None
        instance.stdin.close()
        instance.wait()


def die_with_test_run() -> None:
    run = os.pidfd_open(int(os.environ["PID_OF_TEST_RUN"]))

    def watch() -> None:
        select.select([run], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kind", choices=["vllm", "sglang", "openai"], default="vllm")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--api-key")
    parser.add_argument("--outlives-its-parent", action="store_true")
    parser.add_argument("--model", default="m")
    parser.add_argument("--slow-start-s", type=float, default=0.0)
    parser.add_argument("--deaf", action="store_true", help="does not end at SIGTERM")
    parser.add_argument("--instance", action="store_true")
    parser.add_argument("--die", type=int, metavar="CODE", help="ends at once with this code")
    arguments = parser.parse_args()
    if arguments.outlives_its_parent:
        die_with_test_run()
    else:
        die_with_parent()
        mark = os.environ.get("KVELASTIC_LAUNCHED_BY")
        if mark is not None and json.loads(mark)["controller"][0] != os.getppid():
            sys.exit("its controller was killed while this program was being imported")
    if arguments.die is not None:
        print("dying as told", file=sys.stderr, flush=True)
        sys.exit(arguments.die)
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
