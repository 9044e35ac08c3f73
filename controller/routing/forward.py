"""Forwards a client's request to an engine, and the engine's response back, byte for byte.

This is the hot path: a plain ASGI callable without middleware. It finds the model in the body, and
the request waits at the model's gate. It then goes to the engine with the fewest requests in
flight, and counts as in flight until the last byte of the response is sent. If the client
disconnects, the request is cancelled at whatever stage it is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from kvelastic.controller.http.engine_paths import is_read, is_upstream
from kvelastic.controller.http.headers import Headers, find, sane_request_id, to_client
from kvelastic.controller.http.http_protocol import SEND_TIMEOUT
from kvelastic.controller.http.keys import Key
from kvelastic.controller.http.refusal import Refusal, unknown_model
from kvelastic.controller.http.replies import send_refusal
from kvelastic.controller.http.request_body import (
    Body,
    BodyBudget,
    ClientGoneError,
    Receive,
    read_body,
)
from kvelastic.controller.models.fleet import NOT_SERVED
from kvelastic.controller.models.gate import Ticket, TicketState
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.routing.body_reader import BodyReader
from kvelastic.controller.routing.engine_request import at_an_engine, check_name, request_to_engine
from kvelastic.controller.routing.model_field import Form
from kvelastic.controller.routing.model_name import find_name, rename
from kvelastic.controller.routing.prefill import ONE_TOKEN, Prefill
from kvelastic.units import MAX_PRIORITY

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

_log = logging.getLogger("kvelastic.controller")

ASKED_PATH: Final = "kvelastic.asked_path"
"""Key of a request's ASGI scope: the client's path, if `path` was translated from another API."""
NAMED_MODEL: Final = "kvelastic.named_model"
"""Key of a request's ASGI scope: its model, if that is not in the body or query."""
READ_BODY: Final = "kvelastic.read_body"
"""Key of a request's ASGI scope: its `Body`, a JSON object, if that was already read."""
_OF_ENGINE: Final = frozenset(("engine_failed", "engine_timeout", "engine_refused_upgrade"))
"""Codes of errors that count as the engine's, not as the controller's refusals."""
_FAILED: Final = Refusal(500, "internal_error", "The controller failed; its log says where.")
_COMPLETION_TOKENS: Final = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*([0-9]{1,9})')
_TOKENS_HINT: Final = b"put_tokens", b"ion_tokens"


@dataclass
class Exchange:
    """The state of one request that the log and the traffic statistics need."""

    request_id: str
    method: str
    path: str
    began_s: float
    asked_path: str = ""
    """The client's path, for the log."""
    key: Key | None = None
    """The client's key; None before authorization and after its failure."""
    is_operation: bool = False
    """True if it is not inference. It then needs an admin key, and its outcome is audited."""
    model: ServedModel | None = None
    status: int = 0
    first_s: float | None = None
    """Seconds until the first body byte of the response."""
    tokens: int = 0
    events: int = 0
    sent_bytes: int = 0
    started: bool = False
    is_sent: bool = False
    """The whole response was sent. The client may then disconnect."""
    cancelled: bool = False
    error: str = ""
    """Code of the controller's error; empty for an engine's own response."""
    is_json: bool = False
    """The body is a JSON object that was read. It is not below /upstream."""
    prefill: dict[str, Any] | None = None
    """Fields for the log, if the model has a prefill pool for such requests."""


class Forwarder:
    """The ASGI callable that forwards requests. Use it in the event loop."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        prefix = os.urandom(8).hex()  # so that ids are unique over all controllers
        self._ids = (f"{prefix}-{number:x}" for number in itertools.count(1))
        self.budget = BodyBudget(app_state.settings.server.max_buffered)
        self.reader = BodyReader()
        self._prefill = Prefill(app_state)

    def stop(self) -> None:
        """Stop the body reader. Call it when no exchange runs."""
        self.reader.stop()

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        """Serve one request. A failure becomes an error response or a cut connection.

        Raises only `CancelledError`, when the server shuts down.
        """
        headers: Headers = scope["headers"]
        exchange = self.begin(scope)
        body: Body | None = None
        watcher: asyncio.Task[None] | None = None
        try:
            key = self._authorize(exchange, headers)
            server = self._app_state.settings.server
            body = scope.get(READ_BODY) or await read_body(
                receive,
                find(headers, b"content-length"),
                server.max_body,
                server.body_timeout,
                self.budget,
            )
            exchange.is_json = READ_BODY in scope
            model = scope.get(NAMED_MODEL) or await self._find_model(scope, exchange, body)
            exchange.model = model
            watcher = cancel_when_gone(receive, exchange, "http.disconnect")
            await self._through_gate(scope, send, exchange, model, key, body)
        except Refusal as refusal:
            await self._refuse(send, exchange, refusal)
        except ClientGoneError:
            exchange.cancelled = True
        except asyncio.CancelledError:
            if exchange.model is not None and exchange.model.is_cut_off:
                uncancel()
                await self._refuse(send, exchange, NOT_SERVED)
                return
            if not exchange.cancelled:
                raise  # the server ends
            if SEND_TIMEOUT in scope.get("state", ()):
                exchange.error = "send_timeout"
            uncancel()
        except Exception:
            _log.exception("request %s failed in the controller", exchange.request_id)
            await self._refuse(send, exchange, _FAILED)
        finally:
            if watcher is not None:
                watcher.cancel()
            if body is not None:
                body.release()
            self.end(exchange, scope)

    def begin(self, scope: Any) -> Exchange:
        """Return the `Exchange` of a new request."""
        given = sane_request_id(find(scope["headers"], b"x-request-id"))
        request_id = given.decode() if given is not None else next(self._ids)
        path: str = scope["path"]
        asked_path = scope.get(ASKED_PATH, path)
        return Exchange(request_id, scope["method"], path, time.monotonic(), asked_path)

    def end(self, exchange: Exchange, scope: Any) -> None:
        """Count, log and audit a finished request."""
        self._count(exchange)
        self._audit(exchange, scope)

    async def _find_model(self, scope: Any, exchange: Exchange, body: Body) -> ServedModel:
        """Return the model named in the body or query, and rewrite the name to the engine's."""
        query: bytes = scope["query_string"]
        content_type = find(scope["headers"], b"content-type")
        named = await find_name(body, content_type, query, self.reader)
        model = self._app_state.fleet.find(named.name)
        if model is None:
            raise unknown_model(named.name)
        exchange.is_json = named.form is Form.JSON
        name = model.settings.upstream_name
        if named.name != name:
            scope["query_string"] = rename(named, name, body, query)
        return model

    def _authorize(self, exchange: Exchange, headers: Headers) -> Key:
        """Return the request's key. Raises `Refusal` if it is not authorized."""
        keys = self._app_state.keys
        is_inference = exchange.path in keys.model_paths
        exchange.is_operation = not is_inference and not is_read(exchange.method, exchange.path)
        exchange.key = (keys.check_admin if exchange.is_operation else keys.check_api)(headers)
        return exchange.key

    async def _through_gate(
        self, scope: Any, send: Any, exchange: Exchange, model: ServedModel, key: Key, body: Body
    ) -> None:
        priority = min(priority_of(scope["headers"]), key.max_priority)
        try:
            await self._serve(scope, send, exchange, model, priority, body)
        except Refusal as refusal:
            decode = exchange.model or model
            pool = self._prefill.instead_of(decode, refusal) if _has_prompt(exchange) else None
            if pool is None:
                raise
            exchange.prefill = self._prefill.leave_all_to(
                pool, decode, body, f"decode_{refusal.code}"
            )
            await self._serve(scope, send, exchange, pool, priority, body)

    async def _serve(
        self,
        scope: Any,
        send: Any,
        exchange: Exchange,
        model: ServedModel,
        priority: int,
        body: Body,
    ) -> None:
        ticket = Ticket(priority=priority)
        exchange.model = model
        written = model.settings.upstream_name
        try:
            await model.enter(ticket)
            served: ServedModel = ticket.model
            exchange.model = served
            with served_by(served):
                if served.settings.prefill is not None and _has_prompt(exchange):
                    exchange.prefill = await self._prefill.compute(
                        scope, exchange.request_id, served, body, priority
                    )
                check_name(written, served)
                await self._to_an_engine(scope, send, exchange, served, body)
        finally:
            if ticket.state is not TicketState.OUT:
                ticket.model.leave(ticket)

    async def _to_an_engine(
        self, scope: Any, send: Any, exchange: Exchange, model: ServedModel, body: Body
    ) -> None:
        keys = self._app_state.keys
        headers, target = request_to_engine(scope, exchange.request_id, keys, model)
        async with at_an_engine(
            self._app_state, model, exchange.method, target, headers, body
        ) as response:
            silence = _Silence(response, model.settings.timeouts.idle)
            try:
                await self._back(send, exchange, response, silence)
            finally:
                silence.end()

    async def _back(
        self, send: Any, exchange: Exchange, response: aiohttp.ClientResponse, silence: _Silence
    ) -> None:
        """Send the response in pieces as they arrive. `send` waits for a slow client."""
        if not 200 <= response.status <= 599:
            raise ValueError(f"status {response.status}")
        headers = to_client(response.raw_headers, is_upstream=is_upstream(exchange.asked_path))
        if response.status == 304:  # its Content-Length is of a body that it does not have
            headers = [(k, v) for k, v in headers if k != b"content-length"]
        exchange.status = response.status
        exchange.started = True
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        content = response.content
        while True:
            silence.since_s = time.monotonic()
            piece = await content.readany()
            silence.since_s = None
            if not piece:
                break
            if exchange.first_s is None:
                exchange.first_s = time.monotonic() - exchange.began_s
            exchange.events += piece.count(b"\ndata:") + piece.startswith(b"data:")
            exchange.sent_bytes += len(piece)
            if _TOKENS_HINT[1] in piece or _TOKENS_HINT[0] in piece:
                found = _COMPLETION_TOKENS.findall(piece)
                if found:
                    exchange.tokens = int(found[-1])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        exchange.is_sent = True

    async def _refuse(self, send: Any, exchange: Exchange, refusal: Refusal) -> None:
        """Send the refusal. If the response has started, only record the error: uvicorn cuts."""
        exchange.error = refusal.code
        if exchange.started:
            return
        exchange.status = refusal.status
        await send_refusal(send, refusal, exchange.path, exchange.request_id)

    def _count(self, exchange: Exchange) -> None:
        now_s = time.monotonic()
        total_s = now_s - exchange.began_s
        # A stream reports its tokens only on request. Estimate one token per event.
        tokens = exchange.tokens or max(0, exchange.events - 1)
        if exchange.model is not None:
            exchange.model.traffic.end(
                now_s,
                total_s=total_s,
                first_s=exchange.first_s,
                ok=not exchange.cancelled and not exchange.error and exchange.status < 400,
                tokens=tokens,
                cancelled=exchange.cancelled,
                refused=bool(exchange.error)
                and not exchange.started
                and exchange.error not in _OF_ENGINE,
            )
        else:
            self._app_state.unrouted += 1
        if self._app_state.settings.server.log_requests:
            self._app_state.log.write(
                {
                    "id": exchange.request_id,
                    "method": exchange.method,
                    "path": exchange.asked_path[:256],
                    "model": None if exchange.model is None else exchange.model.name,
                    "key": None if exchange.key is None else exchange.key.id,
                    "status": exchange.status,
                    "error": exchange.error,
                    "cancelled": exchange.cancelled,
                    "first_ms": None
                    if exchange.first_s is None
                    else round(exchange.first_s * 1e3, 2),
                    "total_ms": round(total_s * 1e3, 2),
                    "bytes": exchange.sent_bytes,
                    "tokens": tokens,
                    **(exchange.prefill or {}),
                }
            )

    def _audit(self, exchange: Exchange, scope: Any) -> None:
        if not exchange.is_operation:
            return
        self._app_state.log.audit(
            action=f"{exchange.method} {exchange.asked_path}",
            status=exchange.status,
            error="client_gone" if exchange.cancelled else exchange.error,
            model=None if exchange.model is None else exchange.model.name,
            key=exchange.key or self._app_state.keys.identify(scope["headers"]),
            client=scope["client"],
            request_id=exchange.request_id,
        )


class _Silence:
    """Fails a response if its engine sends nothing for `idle_s` while the controller waits for it.

    It uses one timer per response. aiohttp's own timer is used only until the headers arrive,
    because it would be restarted at every piece received and every piece read.
    """

    __slots__ = ("_content", "_idle_s", "_timer", "since_s")

    def __init__(self, response: aiohttp.ClientResponse, idle_s: float) -> None:
        self.since_s: float | None = None
        """Start of the current wait for the engine; None while the client is the slow side."""
        self._content = response.content
        self._idle_s = idle_s
        self._timer: asyncio.TimerHandle | None = None
        connection = response.connection  # None: the whole response has arrived
        if idle_s and connection is not None and connection.protocol is not None:
            connection.protocol.read_timeout = None
            self._timer = asyncio.get_running_loop().call_later(idle_s, self._look)

    def end(self) -> None:
        """Stop the timer at the end of the response."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        silent_s = 0.0 if self.since_s is None else time.monotonic() - self.since_s
        if silent_s >= self._idle_s:
            self._content.set_exception(asyncio.TimeoutError())
            return
        # The loop may run a timer early by its clock's resolution.
        left_s = self._idle_s - silent_s + 0.002
        self._timer = asyncio.get_running_loop().call_later(left_s, self._look)


def _has_prompt(exchange: Exchange) -> bool:
    """Return True if a prefill pool can compute the request's prompt."""
    return exchange.is_json and exchange.method == "POST" and exchange.path in ONE_TOKEN


@contextmanager
def served_by(model: ServedModel) -> Iterator[None]:
    """Register the current task with the model, so that `ServedModel.cut_off` can cancel it.

    After a cut-off it is cancelled at once: it was admitted before, and registers only now.
    """
    task = asyncio.current_task()
    assert task is not None
    model.serving.add(task)
    if model.is_cut_off:
        task.cancel()
    try:
        yield
    finally:
        model.serving.discard(task)


def priority_of(headers: Headers) -> int:
    """Return `X-Kvelastic-Priority`, clamped to -1000..1000; 0 if absent or invalid."""
    raw = find(headers, b"x-kvelastic-priority")
    if raw is None:
        return 0
    try:
        return max(-MAX_PRIORITY, min(MAX_PRIORITY, int(raw[:8])))
    except ValueError:
        return 0


def cancel_when_gone(receive: Receive, exchange: Exchange, gone: str) -> asyncio.Task[None]:
    """Cancel the current task when `receive` returns a message of type `gone`; return the watcher.

    The watcher sets `exchange.cancelled` first. The caller cancels the watcher when done.
    """
    serving = asyncio.current_task()

    async def watch() -> None:
        while (await receive())["type"] != gone:
            pass
        if exchange.is_sent:
            return  # uvicorn reports a complete response in the same way
        exchange.cancelled = True
        if serving is not None:
            serving.cancel()

    return asyncio.get_running_loop().create_task(watch())


def uncancel() -> None:
    """Clear the current task's cancellation, so that it can finish its bookkeeping."""
    task = asyncio.current_task()
    if task is not None and hasattr(task, "uncancel"):
        task.uncancel()
