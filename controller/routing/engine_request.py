"""Sends a request to one of a model's engines, the one with the fewest requests in flight.

headers, target = request_to_engine(scope, request_id, keys, model)
async with at_an_engine(app_state, model, "POST", target, headers, body) as response:
    ...  # the engine's status and headers have arrived
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from yarl import URL

from kvelastic.controller.http.headers import to_engine
from kvelastic.controller.http.keys import Keys
from kvelastic.controller.http.refusal import (
    Refusal,
    engine_failed,
    engine_timeout,
    engine_unreachable,
)
from kvelastic.controller.http.request_body import Body, Upload
from kvelastic.controller.models.served_model import UNREACHABLE_REST_S, Replica, ServedModel
from kvelastic.errors import is_out_of_descriptors

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

_SKIP_AUTO: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def request_to_engine(
    scope: Any, request_id: str, keys: Keys, model: ServedModel
) -> tuple[list[tuple[str, str]], str]:
    """Return the headers, and the path with the query, of the request to the model's engine."""
    headers = to_engine(
        scope["headers"],
        api_key=model.api_key,
        drop_authorization=keys.has_api_keys,
        carries_key=keys.carries_key if keys else None,
    )
    headers.append((b"x-request-id", request_id.encode()))
    target = scope["raw_path"].decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    return [(k.decode("latin-1"), v.decode("latin-1")) for k, v in headers], target


def check_name(written: str, served: ServedModel) -> None:
    """Raise `Refusal` (503) if the engine's model name changed while the request waited.

    `written` is the name that was written into the request before it waited.
    """
    if written != served.settings.upstream_name:
        raise Refusal(
            503,
            "model_changed",
            "While this request waited, its model's engine was given another name for it"
            " (served_name); send it again.",
            retry_after_s=1.0,
        )


def in_turn(model: ServedModel) -> Iterator[Replica]:
    """Yield each engine of the model once, chosen when the caller asks for the next one."""
    tried: set[str] = set()
    while (replica := model.pick(tried)) is not None:
        yield replica
        tried.add(replica.address)


@asynccontextmanager
async def at_an_engine(
    app_state: AppState,
    model: ServedModel,
    method: str,
    target: str,
    headers: list[tuple[str, str]],
    body: Body,
    *,
    keeps_body: bool = False,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request to an engine of the model and yield the response, whose headers are there.

    The request counts as in flight at that engine while the caller's block runs. An engine that
    refuses the connection is skipped. Releases the body once it is sent, unless `keeps_body`.
    Raises `Refusal` (502, 503, 504), also for errors of aiohttp in the caller's block.
    """
    limits = model.settings.timeouts
    timeout = _client_timeout(limits.total, limits.connect, limits.idle)
    for replica in in_turn(model):
        replica.in_flight += 1
        data = body.in_memory
        began_s = time.monotonic()
        has_begun = False
        try:
            async with app_state.session.request(
                method,
                URL(replica.address + target, encoded=True),
                headers=headers,
                data=Upload(body, keeps_body=keeps_body) if data is None else data or None,
                allow_redirects=False,
                skip_auto_headers=_SKIP_AUTO,
                timeout=timeout,
            ) as response:
                has_begun = True
                replica.is_down = False
                if data is not None and not keeps_body:  # an `Upload` releases the body itself
                    data = None
                    body.release()
                yield response
                return
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if is_out_of_descriptors(error):
                raise app_state.files.refusal("connecting to an engine") from None
            # Nothing was sent, so another engine can serve the request.
            model.rest(replica)
        except asyncio.TimeoutError:
            if not has_begun:
                now_s = time.monotonic()
                replica.resting_until_s = now_s + max(UNREACHABLE_REST_S, now_s - began_s)
            raise engine_timeout() from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if is_out_of_descriptors(error):
                raise app_state.files.refusal("forwarding a request") from None
            raise engine_failed() from None
        finally:
            replica.in_flight -= 1
    raise engine_unreachable()


@lru_cache  # making one takes a hundredth of a request's time
def _client_timeout(total_s: float, connect_s: float, idle_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(
        total=total_s or None, sock_connect=connect_s or None, sock_read=idle_s or None
    )


class BoundedResponse(aiohttp.ClientResponse):
    """Bounds the wait for headers by `sock_read`; `100 Continue` would restart aiohttp's timer."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Wait for the headers. Raises `asyncio.TimeoutError` and aiohttp's errors."""
        protocol = connection.protocol
        if not protocol.read_timeout:
            return await super().start(connection)
        timer = asyncio.get_running_loop().call_later(
            protocol.read_timeout, protocol.set_exception, asyncio.TimeoutError()
        )
        try:
            return await super().start(connection)
        finally:
            timer.cancel()
