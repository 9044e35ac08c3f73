"""Refusals: the controller's own error responses, in the OpenAI, Anthropic or Ollama format."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(eq=False)  # not frozen: Python sets an exception's traceback
class Refusal(Exception):  # noqa: N818 - a response, not a failure
    """Why a request is not served. Raise it anywhere under a route, or pass it as a value."""

    status: int
    code: str
    """Stable error code, for programs."""
    message: str
    """Text for people: the problem, and what to do next."""
    retry_after_s: float | None = None
    param: str | None = None

    def body(self) -> bytes:
        """Return the response body in OpenAI's format."""
        kind = _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def anthropic_body(self, request_id: str | None) -> bytes:
        """Return the response body in Anthropic's format, which has no error code."""
        kind = _ANTHROPIC_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "api_error"
        )
        answer: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": self.message}}
        if request_id is not None:
            answer["request_id"] = request_id
        return json.dumps(answer).encode()

    def ollama_body(self) -> bytes:
        """Return the response body in Ollama's format, which has only the message."""
        return json.dumps({"error": self.message}).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers, without Content-Length."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            seconds = max(1, math.ceil(self.retry_after_s))
            headers.append((b"retry-after", str(seconds).encode()))
        if self.status == 426:
            headers += [(b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade")]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def unknown_model(name: str) -> Refusal:
    """Return a 404 in OpenAI's wording."""
    shown = name if len(name) <= 200 else name[:200] + "..."
    return Refusal(
        404,
        "model_not_found",
        f"The model {shown!r} does not exist here; GET /v1/models lists those that do.",
        param="model",
    )


def engine_unreachable() -> Refusal:
    """Return a 503: no replica accepted the connection."""
    return Refusal(
        503,
        "engine_unreachable",
        "No engine of this model accepts connections; try again later.",
        retry_after_s=2.0,
    )


def engine_timeout() -> Refusal:
    """Return a 504: an engine accepted the connection and sent nothing in time."""
    return Refusal(
        504, "engine_timeout", "The engine did not answer in time (timeouts of this model)."
    )


def engine_failed() -> Refusal:
    """Return a 502: an engine accepted the connection but sent no valid response."""
    return Refusal(
        502, "engine_failed", "The engine broke off the connection, or its answer is not HTTP."
    )
