"""How routes are made: who may ask, and how what they return or raise becomes an answer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvelastic.controller.audit import audit
from kvelastic.controller.durations import parse_duration_s
from kvelastic.controller.refusal import Refusal
from kvelastic.controller.replies import Json, refusal_response
from kvelastic.controller.request_body import read_body
from kvelastic.errors import (
    ControllerConfigError,
    GuaranteeError,
    InvalidArgumentError,
    KvelasticError,
    SegmentBusyError,
    SegmentDeadError,
    SegmentNotFoundError,
    is_out_of_descriptors,
)

if TYPE_CHECKING:
    from kvelastic.controller.front import Front

Handler = Callable[["Front", Request], Awaitable[Any]]


class Who(Enum):
    """Who may use a route."""

    ALL = "everybody"
    API = "holders of a key"
    ADMIN = "holders of an admin key"


_STATUS_OF: dict[type[KvelasticError], int] = {
    InvalidArgumentError: 400,
    ControllerConfigError: 400,
    GuaranteeError: 409,
    SegmentNotFoundError: 404,
    SegmentDeadError: 409,
    SegmentBusyError: 503,
}


def route(front: Front, path: str, method: str, who: Who, handler: Handler) -> Route:
    """A route whose handler returns plain values (JSON) or a response, and raises what it likes."""

    is_audited = who is Who.ADMIN and method != "GET"

    async def endpoint(request: Request) -> Response:
        headers = request.scope["headers"]
        status, error = 500, "internal_error"
        try:
            if who is Who.API:
                front.keys.check_api(headers)
            elif who is Who.ADMIN:
                front.keys.check_admin(headers)
            answer = await handler(front, request)
            response = answer if isinstance(answer, Response) else Json(answer)
            status, error = response.status_code, ""
        except (Refusal, KvelasticError, OSError) as failure:
            refusal = _as_refusal(front, failure, path)
            response = refusal_response(refusal)
            status, error = refusal.status, refusal.code
        finally:
            if is_audited:
                _audit(front, request, status, error)
        return response

    endpoint.__doc__ = handler.__doc__
    return Route(path, endpoint, methods=[method], name=handler.__name__)


def _audit(front: Front, request: Request, status: int, error: str) -> None:
    named = request.path_params.get("model")
    model = None if named is None else front.fleet.find(named)
    audit(
        front.log,
        action=f"{request.method} {request.url.path}",
        status=status,
        error=error,
        model=named if model is None else model.name,
        key=front.keys.identify(request.scope["headers"]),
        client=request.scope["client"],
        asked=getattr(request.state, "asked", None),
    )


def _as_refusal(front: Front, error: Exception, path: str) -> Refusal:
    """Raises what nobody can be told."""
    if isinstance(error, Refusal):
        return error
    if is_out_of_descriptors(error):
        return front.files.refusal(f"serving {path}")
    if not isinstance(error, KvelasticError):
        raise error
    for kind, status in _STATUS_OF.items():
        if isinstance(error, kind):
            retry_after_s = 1.0 if status == 503 else None
            return Refusal(status, error.code, str(error), retry_after_s)
    return Refusal(409, error.code, str(error))


async def json_object(front: Front, request: Request) -> dict[str, Any]:
    """The request's body as a JSON object; nothing at all is an empty one. Raises `Refusal`."""
    server = front.settings.server
    body = await read_body(
        request.receive,
        None,
        min(server.max_body, 1 << 20),
        server.body_timeout,
        front.forwarder.budget,
    )
    data = body.in_memory or b""
    body.release()
    if not data.strip():
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refusal(400, "invalid_json", "The body is not a JSON object.")
    return value


def seconds_of(request: Request, key: str, default_s: float) -> float:
    """A duration from the query. Raises `Refusal` (400)."""
    text = request.query_params.get(key)
    if text is None:
        return default_s
    try:
        return parse_duration_s(text)
    except InvalidArgumentError as error:
        raise Refusal(400, error.code, str(error), param=key) from None


def number_of(value: Any, key: str) -> float:
    """A finite number that a body gives. Raises `Refusal` (400)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refusal(400, "invalid_value", f"{key} is not a number.", param=key)
    return float(value)


__all__ = ["Handler", "Who", "asyncio", "json_object", "number_of", "route", "seconds_of"]
