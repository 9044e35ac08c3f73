"""Builds routes: authorization, and responses from a handler's result or exception."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.replies import Json, refusal_response
from kvelastic.controller.http.request_body import ClientGoneError
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
from kvelastic.units import parse_duration_s

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState
    from kvelastic.controller.models.served_model import ServedModel

_CLIENT_GONE: Final = 499
Handler = Callable[["AppState", Request], Awaitable[Any]]


class Who(Enum):
    """The authorization that a route needs."""

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


def route(app_state: AppState, path: str, method: str, who: Who, handler: Handler) -> Route:
    """Return a route for `handler`, which returns plain values (sent as JSON) or a response.

    `Refusal`, `KvelasticError` and `OSError` from the handler become refusals where possible.
    Admin requests other than GET are audited.
    """

    is_audited = who is Who.ADMIN and method != "GET"

    async def endpoint(request: Request) -> Response:
        headers = request.scope["headers"]
        status, error = 500, "internal_error"
        try:
            if who is Who.API:
                app_state.keys.check_api(headers)
            elif who is Who.ADMIN:
                app_state.keys.check_admin(headers)
            answer = await handler(app_state, request)
            response = answer if isinstance(answer, Response) else Json(answer)
            status, error = response.status_code, ""
        except (Refusal, KvelasticError, OSError) as failure:
            refusal = _as_refusal(app_state, failure, path)
            response = refusal_response(refusal)
            status, error = refusal.status, refusal.code
        except ClientGoneError:
            response = Response(status_code=_CLIENT_GONE)  # never read
            status, error = 0, "client_gone"
        finally:
            if is_audited:
                _audit(app_state, request, status, error)
        return response

    endpoint.__doc__ = handler.__doc__
    return Route(path, endpoint, methods=[method], name=handler.__name__)


def _audit(app_state: AppState, request: Request, status: int, error: str) -> None:
    named = request.path_params.get("model")
    model = None if named is None else app_state.fleet.find(named)
    app_state.log.audit(
        action=f"{request.method} {request.url.path}",
        status=status,
        error=error,
        model=named if model is None else model.name,
        key=app_state.keys.identify(request.scope["headers"]),
        client=request.scope["client"],
        asked=getattr(request.state, "asked", None),
    )


def _as_refusal(app_state: AppState, error: Exception, path: str) -> Refusal:
    """Return the refusal for an error. Raises an `OSError` that has no refusal again."""
    if isinstance(error, Refusal):
        return error
    if is_out_of_descriptors(error):
        return app_state.files.refusal(f"serving {path}")
    if not isinstance(error, KvelasticError):
        raise error
    for kind, status in _STATUS_OF.items():
        if isinstance(error, kind):
            retry_after_s = 1.0 if status == 503 else None
            return Refusal(status, error.code, str(error), retry_after_s)
    return Refusal(409, error.code, str(error))


def instance_of(model: ServedModel) -> str:
    """Return the name of a model's segment. Raises `SegmentNotFoundError` if none is configured."""
    name = model.settings.instance
    if name is None:
        raise SegmentNotFoundError(f"no instance is configured for the model {model.name!r}")
    return name


def seconds_of(request: Request, key: str, default_s: float) -> float:
    """Return a duration of the query in seconds, or the default. Raises `Refusal` (400)."""
    text = request.query_params.get(key)
    if text is None:
        return default_s
    try:
        return parse_duration_s(text)
    except InvalidArgumentError as error:
        raise Refusal(400, error.code, str(error), param=key) from None
