"""Ollama's API over the same models: /api/..., an ASGI callable.

Inference requests go through `Forwarder` like all others. This module translates a request from
Ollama's API to OpenAI's, and the response back.

    client --/api/chat--> read, to_openai --> Forwarder --/v1/chat/completions--> engine
           <--JSON lines-- _Answer <--------- send <----- server-sent events ----

Small bodies are translated in the event loop, larger ones by the process of `body_reader`.

Keys and origins are checked as on all routes. Without `auth.api_keys`, which is allowed on loopback
only, no key is needed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvelastic import __version__
from kvelastic.controller.http.headers import Headers, find
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.replies import send_refusal
from kvelastic.controller.http.request_body import Body, ClientGoneError, Receive, read_body
from kvelastic.controller.models import instance_memory
from kvelastic.controller.models.gate import State, Ticket
from kvelastic.controller.models.instance_memory import DeviceClaims
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.routing import ollama_models
from kvelastic.controller.routing.body_worker import FromOpenAI, ToOpenAI
from kvelastic.controller.routing.forward import ASKED_PATH, NAMED_MODEL, READ_BODY
from kvelastic.controller.routing.model_field import Form
from kvelastic.controller.routing.ollama_answer import (
    BadAnswerError,
    Stream,
    Times,
    error_body,
    error_text,
    loaded,
    whole,
)
from kvelastic.controller.routing.ollama_models import Listed, timestamp
from kvelastic.controller.routing.ollama_request import BODY_BYTES, Call, Head, read, to_openai
from kvelastic.errors import KvelasticError

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState
    from kvelastic.controller.routing.body_reader import BodyReader

ANSWER_BYTES: Final = 64 << 20
"""Maximum size of an engine's response that is not a stream."""
HERE_BYTES: Final = 64 << 10
"""Maximum that is translated in the loop at a time; it takes at most about ten milliseconds."""
_OUR_OWN: Final = frozenset(
    (b"accept", b"accept-encoding", b"content-length", b"content-type", b"transfer-encoding")
)
"""The client's headers that do not apply to the translated request or its response."""
_KEPT: Final = frozenset((b"retry-after", b"x-request-id", b"www-authenticate"))
"""Headers of the engine's response that are passed on."""

Handler = Callable[["OllamaApi", bytes], Awaitable[dict[str, Any]]]


class OllamaApi:
    """The ASGI callable for paths under /api/; one per application. Use it in the event loop."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        """Serve one request under /api/. Refusals are sent in Ollama's format."""
        path, method = scope["path"], scope["method"]
        try:
            call = _CALLS.get(path)
            wanted = "POST" if call is not None else _ROUTES.get(path, ("", None))[0]
            if not wanted:
                raise _not_served(path)
            if method != wanted and (method, wanted) != ("HEAD", "GET"):
                raise Refusal(405, "method_not_allowed", f"{path} takes {wanted}.")
            if path != "/api/version":
                self._app_state.keys.check_api(scope["headers"])
            body = await self._body(scope, receive, BODY_BYTES if call is not None else HERE_BYTES)
            try:
                if call is not None:
                    await self._ask(scope, receive, send, call, body)
                else:
                    found = await _ROUTES[path][1](self, body.in_memory or b"")
                    await _send(send, 200, [msgspec.json.encode(found)])
            finally:
                body.release()
        except Refusal as refusal:
            await send_refusal(send, refusal, path)
        except KvelasticError as error:
            await send_refusal(send, Refusal(503, error.code, str(error), 1.0), path)
        except ClientGoneError:
            pass

    # ------------------------------------------------------------------------------ lists

    async def version(self, _: bytes) -> dict[str, Any]:
        """Return the controller's version."""
        return {"version": __version__}

    async def tags(self, _: bytes) -> dict[str, Any]:
        """Return all models."""
        return ollama_models.tags(await self._listed(list(self._app_state.fleet)))

    async def running(self, _: bytes) -> dict[str, Any]:
        """Return the models that are awake."""
        awake = [model for model in self._app_state.fleet if model.state is State.AWAKE]
        return ollama_models.running(await self._listed(awake), _now())

    async def show(self, body: bytes) -> dict[str, Any]:
        """Return one model. Raises `Refusal` (400, 404)."""
        try:
            asked = msgspec.json.decode(body, type=_Named)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise Refusal(400, "invalid_json", f"The request is not understood: {error}.") from None
        model = self._need(asked.model or asked.name or "")
        (listed,) = await self._listed([model])
        return ollama_models.shown(listed)

    async def _listed(self, models: list[ServedModel]) -> list[Listed]:
        memory = await asyncio.to_thread(instance_memory.claims)
        since = datetime.fromtimestamp(self._app_state.started_at, timezone.utc)
        return [self._entry(model, memory, since) for model in models]

    def _entry(
        self, model: ServedModel, memory: dict[str, DeviceClaims], since: datetime
    ) -> Listed:
        settings, instance, idle_after_s = model.settings, model.instance, model.idle_after_s
        claims = [
            device.full[instance].all_bytes for device in memory.values() if instance in device.full
        ]
        expires_in_s = None
        if idle_after_s is not None and settings.may_sleep:
            expires_in_s = idle_after_s - model.idle_s
        return Listed(
            name=model.name,
            since=since,
            bytes=sum(claims) or settings.memory.needs or 0,
            capabilities=settings.capabilities,
            expires_in_s=expires_in_s,
        )

    # ------------------------------------------------------------------------ inference

    async def _ask(self, scope: Any, receive: Receive, send: Any, call: Call, body: Body) -> None:
        made = Body(self._app_state.forwarder.budget)
        try:
            model, asked, path = await self._translate(call, body, made)
            body.release()
            if asked.is_load:
                await self._load(receive, model, asked)
                is_unload = asked.keep_alive_s == 0
                text = loaded(call, asked.model, timestamp(_now()), is_unload=is_unload)
                await _send(send, 200, [text])
                return
            answer = _Answer(send, asked, self._app_state)
            try:
                given = {NAMED_MODEL: model, READ_BODY: made}
                await self._app_state.forwarder(
                    {**_scope_of(scope, path, made.size), **given}, receive, answer
                )
                await answer.cut()
            finally:
                answer.release()
                model.keep_alive(asked.keep_alive_s)
        finally:
            made.release()

    async def _translate(self, call: Call, body: Body, made: Body) -> tuple[ServedModel, Head, str]:
        """Write the translated request into `made`; return its model, its head and its path."""
        data = body.in_memory
        if data is not None and len(data) <= HERE_BYTES:
            asked = read(call, data)
            model = self._need(asked.model)
            path = ""
            if not asked.is_load:
                path, text = to_openai(asked, model.settings.upstream_name, model.settings.engine)
                made.append(text)
            return model, asked.head, path
        reader = self._app_state.forwarder.reader
        field = await reader.find_model(body.to_file(), Form.JSON, b"")
        if field is None or not field.name:
            raise Refusal(400, "model_missing", "model is required", param="model")
        model = self._need(field.name)
        question = ToOpenAI(call, model.settings.upstream_name, model.settings.engine)
        answer = await reader.translate(question, body.to_file(), made.to_file())
        assert answer.head is not None
        made.take_written()
        return model, answer.head, answer.path

    async def _load(self, receive: Receive, model: ServedModel, asked: Head) -> None:
        """Wake the model, or put it to sleep if `keep_alive` is 0 and it is idle.

        Waits until that is done. Raises `Refusal` and `ClientGoneError`.
        """
        if asked.keep_alive_s != 0:
            ticket = Ticket()
            loop = asyncio.get_running_loop()
            entering = loop.create_task(model.enter(ticket))
            gone = loop.create_task(_gone(receive))
            try:
                await asyncio.wait({entering, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not entering.done():
                    raise ClientGoneError
                entering.result()
            finally:
                entering.cancel()
                gone.cancel()
                if ticket.model is not None:
                    ticket.model.leave(ticket)
        model.keep_alive(asked.keep_alive_s)
        if asked.keep_alive_s == 0:
            await model.settled()

    async def _body(self, scope: Any, receive: Receive, most_bytes: int) -> Body:
        server = self._app_state.settings.server
        return await read_body(
            receive,
            find(scope["headers"], b"content-length"),
            min(server.max_body, most_bytes),
            server.body_timeout,
            self._app_state.forwarder.budget,
        )

    def _need(self, name: str) -> ServedModel:
        for each in ollama_models.names_of(name):
            model = self._app_state.fleet.find(each)
            if model is not None:
                return model
        raise Refusal(404, "model_not_found", f"model {name[:200]!r} not found", param="model")


class _Named(msgspec.Struct):
    """A request that only names a model, with the current key (`model`) or the old one."""

    model: str | None = None
    name: str | None = None


class _Answer:
    """The forwarder's `send`: translates the engine's response to Ollama's API and sends it."""

    def __init__(self, send: Any, asked: Head, app_state: AppState) -> None:
        self._send = send
        self._asked = asked
        self._began_s = self._answered_s = time.monotonic()
        self._first_s: float | None = None
        self._status = 0
        self._headers: Headers = []
        self._stream: Stream | None = None
        """The translator of a streamed response whose headers are sent; else None."""
        self._reader: BodyReader = app_state.forwarder.reader
        self._data = Body(app_state.forwarder.budget)
        """A response that is translated as a whole; `_made` is its translation."""
        self._room_bytes = 0
        self._made = Body(app_state.forwarder.budget)
        self._is_over = False

    async def __call__(self, message: Any) -> None:
        """Take the next ASGI message of the response. Waits for a slow client."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            await self._start(message)
            return
        piece: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self._first_s is None and piece:
            self._first_s = time.monotonic()
        try:
            if self._stream is not None:
                await self._go_on(self._stream, piece, is_last)
            else:
                await self._collect(piece, is_last)
        except BadAnswerError as error:
            await self._fail(f"The engine's answer cannot be used: {error}.")

    async def cut(self) -> None:
        """Send an error if the response has started but is incomplete. Call after the forwarder."""
        if self._status and not self._is_over:
            await self._fail("The engine broke off its answer.")

    def release(self) -> None:
        """Release the buffered bodies. Idempotent."""
        self._data.release()
        self._made.release()

    async def _start(self, message: Any) -> None:
        self._answered_s = time.monotonic()
        self._status = message["status"]
        self._headers = [(k, v) for k, v in message["headers"] if k in _KEPT]
        self._room_bytes = HERE_BYTES if self._status >= 400 else ANSWER_BYTES
        if self._status < 400 and self._asked.streams:
            self._stream = Stream(self._asked.call, self._asked.model)
            await self._send(_head(200, b"application/x-ndjson", self._headers))

    async def _go_on(self, stream: Stream, piece: bytes, is_last: bool) -> None:
        created_at = timestamp(_now())
        while len(piece) > HERE_BYTES:
            lines = stream.feed(piece[:HERE_BYTES], created_at)
            piece = piece[HERE_BYTES:]
            await self._send(_piece(lines, more=True))
            await asyncio.sleep(0)
        lines = stream.feed(piece, created_at)
        if is_last:
            lines += stream.end(self._times(), created_at)
        self._is_over = is_last
        if lines or is_last:
            await self._send(_piece(lines, more=not is_last))

    async def _collect(self, piece: bytes, is_last: bool) -> None:
        is_error = self._status >= 400
        if len(piece) > self._room_bytes and not is_error:
            raise BadAnswerError("it is too large")
        piece = piece[: self._room_bytes]
        self._room_bytes -= len(piece)
        try:
            self._data.append(piece)
            if is_last:
                await self._turn()
        except Refusal as refusal:
            raise BadAnswerError(refusal.message.rstrip(".")) from None
        if is_last:
            self._is_over = True
            await _send(
                self._send, self._status, self._made.pieces(), self._headers, self._made.size
            )

    async def _turn(self) -> None:
        """Translate the collected response into `_made`. Raises `BadAnswerError`, `Refusal`."""
        call, model, data = self._asked.call, self._asked.model, self._data.in_memory
        if self._status >= 400:
            self._made.append(error_body(error_text(self._status, data or b"")))
        elif data is not None and len(data) <= HERE_BYTES:
            self._made.append(whole(call, model, data, self._times(), timestamp(_now())))
        else:
            question = FromOpenAI(call, model, self._times(), timestamp(_now()))
            into = self._made.to_file()
            await self._reader.translate(question, self._data.to_file(), into)
            self._made.take_written()
        self._data.release()

    async def _fail(self, message: str) -> None:
        """Send an error and end the response. In a stream the error is its last line."""
        self._is_over = True
        if self._stream is not None:
            await self._send(_piece(error_body(message), more=False))
        else:
            await _send(self._send, 502, [error_body(message)], self._headers)

    def _times(self) -> Times:
        now_s = time.monotonic()
        return Times(self._began_s, self._answered_s, self._first_s or now_s, now_s)


_CALLS: Final = {call.value: call for call in Call}
_ROUTES: Final[dict[str, tuple[str, Handler]]] = {
    "/api/version": ("GET", OllamaApi.version),
    "/api/tags": ("GET", OllamaApi.tags),
    "/api/ps": ("GET", OllamaApi.running),
    "/api/show": ("POST", OllamaApi.show),
}


def _scope_of(scope: Any, path: str, length: int) -> Any:
    """Return the ASGI scope of the translated request: new path and body, same client."""
    headers = [(k, v) for k, v in scope["headers"] if k not in _OUR_OWN]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    return {
        **scope,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        ASKED_PATH: scope["path"],
    }


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(
    send: Any,
    status: int,
    pieces: Iterable[bytes],
    more: Headers | None = None,
    size: int | None = None,
) -> None:
    if size is None:
        pieces = list(pieces)
        size = sum(map(len, pieces))
    headers = [*(more or []), (b"content-length", str(size).encode())]
    await send(_head(status, b"application/json; charset=utf-8", headers))
    for piece in pieces:
        await send(_piece(piece, more=True))
    await send(_piece(b"", more=False))


def _head(status: int, kind: bytes, headers: Headers) -> Any:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind), *headers],
    }


def _piece(body: bytes, *, more: bool) -> Any:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _not_served(path: str) -> Refusal:
    return Refusal(
        404,
        "not_served",
        f"{path[:200]} is not served here: models are named in the controller's configuration, and"
        " neither pulled, made, copied nor removed by requests.",
    )
