"""Answers of the controller's own: JSON, and refusals, also below starlette."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvelastic.controller.refusal import Refusal


class Json(Response):
    """JSON, strictly: a number that JSON cannot say is a bug here and raises."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write it."""
        return json.dumps(content, allow_nan=False).encode()


def refusal_response(refusal: Refusal) -> Response:
    """A refusal as a response of starlette."""
    response = Response(refusal.body(), refusal.status)
    response.raw_headers.extend(refusal.headers())
    return response


async def on_refusal(_request: Request, error: Exception) -> Response:
    """Starlette's handler of `Refusal`."""
    assert isinstance(error, Refusal)
    return refusal_response(error)


async def send_refusal(send: Any, refusal: Refusal, request_id: str | None = None) -> None:
    """The same for a plain ASGI callable."""
    body = refusal.body()
    headers = [*refusal.headers(), (b"content-length", str(len(body)).encode())]
    if request_id is not None:
        headers.append((b"x-request-id", request_id.encode()))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
