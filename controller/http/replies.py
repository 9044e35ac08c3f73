"""The controller's own responses: JSON and refusals, with or without starlette."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvelastic.controller.http.engine_paths import is_anthropic, is_ollama
from kvelastic.controller.http.headers import Headers
from kvelastic.controller.http.refusal import Refusal


class Json(Response):
    """A JSON response. A number that JSON cannot represent (NaN) is a bug and raises."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content, allow_nan=False).encode()


def refusal_response(refusal: Refusal) -> Response:
    """Return a refusal as a starlette response."""
    response = Response(refusal.body(), refusal.status)
    response.raw_headers.extend(refusal.headers())
    return response


async def on_refusal(_request: Request, error: Exception) -> Response:
    """Handle `Refusal` in starlette."""
    assert isinstance(error, Refusal)
    return refusal_response(error)


def refusal_parts(
    refusal: Refusal, path: str, request_id: str | None = None
) -> tuple[Headers, bytes]:
    """Return a refusal's headers and body, in the API format of the path's clients."""
    headers = refusal.headers()
    if request_id is not None:
        headers.append((b"x-request-id", request_id.encode()))
    if is_anthropic(path):
        body = refusal.anthropic_body(request_id)
        if request_id is not None:  # the header that Anthropic's clients read
            headers.append((b"request-id", request_id.encode()))
    elif is_ollama(path):
        body = refusal.ollama_body()
    else:
        body = refusal.body()
    headers.append((b"content-length", str(len(body)).encode()))
    return headers, body


async def send_refusal(
    send: Any, refusal: Refusal, path: str, request_id: str | None = None
) -> None:
    """Send a refusal of a request for `path`, in a plain ASGI callable."""
    headers, body = refusal_parts(refusal, path, request_id)
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
