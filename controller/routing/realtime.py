"""WebSockets to engines: /v1/realtime?model=NAME, and /upstream/{model}/v1/realtime.

    client --- ASGI (uvicorn) --- Realtime --- aiohttp --- engine
             messages, both ways, one at a time each way; a close ends the other side as well

A WebSocket waits at the model's gate and wakes the model before its handshake completes. It counts
as in flight until it is closed, so it keeps the model awake. It is closed if neither side sends
a message for `timeouts.idle`. Messages are not inspected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from yarl import URL

from kvelastic.controller.http.engine_paths import REALTIME, is_upstream
from kvelastic.controller.http.refusal import (
    Refusal,
    engine_failed,
    engine_timeout,
    engine_unreachable,
    unknown_model,
)
from kvelastic.controller.http.replies import refusal_parts
from kvelastic.controller.http.request_body import ClientGoneError
from kvelastic.controller.http.websocket_protocol import MESSAGE_BYTES
from kvelastic.controller.models.fleet import NOT_SERVED
from kvelastic.controller.models.gate import Ticket, TicketState
from kvelastic.controller.models.served_model import Replica, ServedModel
from kvelastic.controller.routing.engine_request import check_name, in_turn, request_to_engine
from kvelastic.controller.routing.forward import (
    NAMED_MODEL,
    Exchange,
    cancel_when_gone,
    priority_of,
    served_by,
    uncancel,
)
from kvelastic.controller.routing.model_name import name_in_query, rename_in_query
from kvelastic.controller.routing.upstream import to_upstream
from kvelastic.controller.timeout import timeout
from kvelastic.errors import is_out_of_descriptors

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

_log = logging.getLogger("kvelastic.controller")

ENGINE_PING_S: Final = 60.0
"""Interval of pings to an engine; its pong must arrive within half of it."""
_CLOSE_S: Final = 5.0
"""Timeout of the close handshake with an engine."""
_LEAVE_S: Final = 0.1
"""Timeout of the close handshake after a client has gone; messages of the engine are dropped."""
_KEY_PROTOCOL: Final = "openai-insecure-api-key."
"""Prefix of the subprotocol in which OpenAI's browser clients send a key. A web page cannot set
headers of a WebSocket."""

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
ENGINE_FAILED: Final = 1011
_REASON_BYTES: Final = 123
_SAYS_NOTHING: Final = frozenset((1005, 1006, 1015))
"""Codes that mean a close without a code; they are never sent."""


class Closed(Exception):  # noqa: N818 - an end, not an accident
    """The client or the engine has closed its side."""

    def __init__(
        self, code: int, reason: str = "", error: str = "", *, by_client: bool = False
    ) -> None:
        super().__init__(code, reason)
        self.code = NORMAL if code in _SAYS_NOTHING else code
        self.reason = reason
        self.error = error
        """The error code for the log; empty if there was no error."""
        self.by_client = by_client


class Realtime:
    """An ASGI callable for scopes of the type `websocket`; one per application."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one WebSocket until it is closed.

        A failure becomes an HTTP response or a close. Raises only for an error in the controller,
        and `CancelledError` if the server shuts down.
        """
        forwarder = self._app_state.forwarder
        scope = {**scope, "method": "GET"}
        exchange = forwarder.begin(scope)
        await receive()  # `websocket.connect`
        try:
            await self._serve(scope, receive, send, exchange)
        except Refusal as refusal:
            exchange.error = refusal.code
            exchange.status = refusal.status
            await _refuse(send, exchange, refusal)
        except (ClientGoneError, OSError):  # an OSError: uvicorn's own for a client that has gone
            exchange.cancelled = True
        except asyncio.CancelledError:
            if exchange.model is not None and exchange.model.is_cut_off:
                exchange.error = NOT_SERVED.code
            elif not exchange.cancelled:
                raise  # the server ends
            uncancel()
        except Exception:
            _log.exception("WebSocket %s failed in the controller", exchange.request_id)
            exchange.error = "internal_error"
            raise  # uvicorn answers or closes
        finally:
            forwarder.end(exchange, scope)

    async def _serve(self, scope: Any, receive: Any, send: Any, exchange: Exchange) -> None:
        app_state = self._app_state
        if app_state.keys:
            _take_key_of_protocols(scope)
        if is_upstream(scope["path"]):
            scope.update(to_upstream(scope, app_state.fleet, app_state.keys))
            exchange.path = scope["path"]
            if exchange.path != REALTIME:
                raise Refusal(400, "invalid_path", f"Of an engine's WebSockets only {REALTIME}.")
        key = exchange.key = app_state.keys.check_api(scope["headers"])
        model = scope.get(NAMED_MODEL) or self._find_model(scope)
        exchange.model = model
        ticket = Ticket(priority=min(priority_of(scope["headers"]), key.max_priority))
        written = model.settings.upstream_name
        watcher = cancel_when_gone(receive, exchange, "websocket.disconnect")
        try:
            await model.enter(ticket)
            exchange.model = served = ticket.model
            check_name(written, served)
            replica, engine = await self._connect(scope, exchange, served)
            try:
                watcher.cancel()
                await asyncio.wait({watcher})
                await send({"type": "websocket.accept", "subprotocol": engine.protocol})
                exchange.status, exchange.started = 101, True
                with served_by(served):
                    await _Relay(receive, send, engine, exchange, served).run()
            finally:
                replica.in_flight -= 1
                await _close(engine, GOING_AWAY, "", _LEAVE_S)
        finally:
            watcher.cancel()
            if ticket.state is not TicketState.OUT:
                ticket.model.leave(ticket)

    def _find_model(self, scope: Any) -> ServedModel:
        """Return the model named in the query, and rewrite the query to the engine's name."""
        query: bytes = scope["query_string"]
        field = name_in_query(query)
        model = self._app_state.fleet.find(field.name)
        if model is None:
            raise unknown_model(field.name)
        if field.name != model.settings.upstream_name:
            scope["query_string"] = rename_in_query(field, model.settings.upstream_name, query)
        return model

    async def _connect(
        self, scope: Any, exchange: Exchange, model: ServedModel
    ) -> tuple[Replica, aiohttp.ClientWebSocketResponse[bool]]:
        """Connect to one of the model's engines and count the WebSocket as in flight there.

        Raises `Refusal` if no engine accepts the connection.
        """
        keys = self._app_state.keys
        headers, target = request_to_engine(scope, exchange.request_id, keys, model)
        headers = [(k, v) for k, v in headers if not k.startswith("sec-websocket-")]
        limits = model.settings.timeouts
        for replica in in_turn(model):
            replica.in_flight += 1
            # `ws_connect` bounds the connection by its session's timeouts only.
            session = aiohttp.ClientSession(
                connector=self._app_state.session.connector,
                connector_owner=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect or None),
            )
            try:
                async with timeout(limits.idle or None), session:
                    engine = await session.ws_connect(
                        URL(replica.address + target, encoded=True),
                        headers=headers,
                        protocols=scope["subprotocols"],
                        max_msg_size=MESSAGE_BYTES,
                        heartbeat=ENGINE_PING_S,
                        timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                    )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                replica.in_flight -= 1
                if is_out_of_descriptors(error):
                    raise self._app_state.files.refusal("connecting to an engine") from None
                model.rest(replica)
            except BaseException as error:
                replica.in_flight -= 1
                raise _as_refusal(error) from None
            else:
                return replica, engine
        raise engine_unreachable()


class _Relay:
    """Relays messages between a client and an engine. If one side closes, closes the other."""

    def __init__(
        self,
        receive: Any,
        send: Any,
        engine: aiohttp.ClientWebSocketResponse[bool],
        exchange: Exchange,
        model: ServedModel,
    ) -> None:
        self._receive = receive
        self._send = send
        self._engine = engine
        self._exchange = exchange
        self._model = model
        self._said_s = self._began_s = time.monotonic()

    async def run(self) -> None:
        """Relay until both sides are closed. Raises `ClientGoneError`."""
        loop = asyncio.get_running_loop()
        ways = {loop.create_task(self._to_engine()), loop.create_task(self._to_client())}
        try:
            closed = await self._first_end(ways)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            for way in ways:  # if both ended at once, mark the second error as retrieved
                if not way.cancelled():
                    way.exception()
        self._exchange.error = closed.error
        if not closed.by_client:
            reason = closed.reason.encode()[:_REASON_BYTES].decode(errors="ignore")
            await self._send({"type": "websocket.close", "code": closed.code, "reason": reason})
        await _close(self._engine, closed.code, closed.reason, _CLOSE_S)

    async def _first_end(self, ways: set[asyncio.Task[None]]) -> Closed:
        """Wait for the first close and return its cause: a side closed, or a timeout."""
        limits = self._model.settings.timeouts
        while True:
            now_s = time.monotonic()
            left = []
            if limits.idle:
                left.append(self._said_s + limits.idle - now_s)
            if limits.total:
                left.append(self._began_s + limits.total - now_s)
            if left and min(left) <= 0:
                return Closed(GOING_AWAY, "timeouts of this model", "engine_timeout")
            done, _ = await asyncio.wait(
                ways,
                timeout=min(left) + 0.002 if left else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for way in done:
                error = way.exception()
                if isinstance(error, Closed):
                    return error
                assert error is not None
                raise error

    async def _to_engine(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                if "reason" not in message:
                    raise ClientGoneError  # without a close
                raise Closed(message["code"], message["reason"] or "", by_client=True)
            self._said_s = time.monotonic()
            text = message.get("text")
            try:
                if text is not None:
                    await self._engine.send_str(text)
                else:
                    await self._engine.send_bytes(message["bytes"])
            except (aiohttp.ClientError, OSError):
                raise _broken_off() from None

    async def _to_client(self) -> None:
        exchange, engine = self._exchange, self._engine
        while True:
            message = await engine.receive()
            self._said_s = time.monotonic()
            if message.type is aiohttp.WSMsgType.TEXT:
                sent = {"type": "websocket.send", "text": message.data}
            elif message.type is aiohttp.WSMsgType.BINARY:
                sent = {"type": "websocket.send", "bytes": message.data}
            elif message.type is aiohttp.WSMsgType.CLOSE:
                raise Closed(int(message.data or NORMAL), str(message.extra or ""))
            else:  # cut off or unreadable, for example too large
                raise _broken_off()
            if exchange.first_s is None:
                exchange.first_s = self._said_s - exchange.began_s
            exchange.sent_bytes += len(message.data)
            await self._send(sent)


def _broken_off() -> Closed:
    return Closed(ENGINE_FAILED, "the engine broke off the connection", "engine_failed")


def _as_refusal(error: BaseException) -> BaseException:
    """Return the refusal for a failed handshake with an engine; other errors unchanged."""
    if isinstance(error, aiohttp.WSServerHandshakeError):
        status = error.status if 400 <= error.status <= 599 else 502
        message = f"The engine refuses the WebSocket with status {error.status}."
        return Refusal(status, "engine_refused_upgrade", message)
    if isinstance(error, asyncio.TimeoutError):
        return engine_timeout()
    if isinstance(error, aiohttp.ClientError | OSError | ValueError):
        return engine_failed()
    return error


async def _close(
    engine: aiohttp.ClientWebSocketResponse[bool], code: int, reason: str, timeout_s: float
) -> None:
    """Close the connection to the engine. Idempotent, and valid in any state."""
    closing = engine.close(code=code, message=reason.encode()[:_REASON_BYTES])
    with suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
        async with timeout(timeout_s):
            await closing


def _take_key_of_protocols(scope: Any) -> None:
    """Move a key from the subprotocols to the headers, so that it is not sent to the engine."""
    offered: list[str] = scope["subprotocols"]
    keys = [each for each in offered if each.startswith(_KEY_PROTOCOL)]
    if keys:
        scope["subprotocols"] = [each for each in offered if each not in keys]
        key = keys[0].removeprefix(_KEY_PROTOCOL).encode("latin-1")
        scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + key)]


async def _refuse(send: Any, exchange: Exchange, refusal: Refusal) -> None:
    """Reject the handshake with an HTTP response."""
    headers, body = refusal_parts(refusal, exchange.path, exchange.request_id)
    try:
        await send(
            {"type": "websocket.http.response.start", "status": refusal.status, "headers": headers}
        )
        await send({"type": "websocket.http.response.body", "body": body, "more_body": False})
    except OSError:
        exchange.cancelled = True
