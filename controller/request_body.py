"""A request's body: read within bounds, and asked which model it is for."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import parse_qs

from kvelastic.controller.refusal import Refusal

Receive = Callable[[], Awaitable[Any]]

_PART_NAME: Final = re.compile(
    rb'content-disposition:[^\r\n]*?;[ \t]*name="?model"?[ \t]*(?:;|\r\n)', re.IGNORECASE
)
_MODEL_NAME_BYTES: Final = 1024


class ClientGoneError(Exception):
    """The client went away before its request was whole."""


class BodyBudget:
    """Bytes of bodies that are held at this moment, for all requests together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, count: int) -> None:
        """Raises `Refusal` (503) if it is too much."""
        if self.held_bytes + count > self.limit_bytes:
            raise Refusal(
                503,
                "controller_full",
                "The controller holds as many requests as server.max_buffered allows; try again.",
                retry_after_s=1.0,
            )
        self.held_bytes += count

    def give(self, count: int) -> None:
        """The body is no longer held."""
        self.held_bytes -= count


async def read_body(
    receive: Receive, declared: bytes | None, limit_bytes: int, timeout_s: float, budget: BodyBudget
) -> bytes:
    """Read it whole; what is returned is taken from the budget.

    Raises `Refusal` (413 too large, 408 too slow, 503 no budget) or `ClientGoneError`.
    """
    if declared is not None and declared.isdigit() and int(declared[:20]) > limit_bytes:
        raise _too_large(limit_bytes)
    pieces: list[bytes] = []
    size = 0
    is_late = False
    task = asyncio.current_task()

    def late() -> None:
        nonlocal is_late
        is_late = True
        if task is not None:
            task.cancel()

    loop = asyncio.get_running_loop()
    # asyncio.wait_for would start a task for every request.
    timer = loop.call_later(timeout_s, late)
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            piece = message.get("body", b"")
            if piece:
                if size + len(piece) > limit_bytes:
                    raise _too_large(limit_bytes)
                budget.take(len(piece))
                size += len(piece)
                pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            timer.cancel()
            timer = loop.call_later(timeout_s, late)
    except asyncio.CancelledError:
        budget.give(size)
        if not is_late:
            raise
        if task is not None and hasattr(task, "uncancel"):
            task.uncancel()
        raise Refusal(
            408, "request_timeout", f"No piece of the body came for {timeout_s:g} s."
        ) from None
    except BaseException:
        budget.give(size)
        raise
    finally:
        timer.cancel()


def model_of(
    body: bytes, content_type: bytes | None, query: bytes
) -> tuple[str, dict[str, Any] | None]:
    """The model's name that a request gives, and the body as JSON if it was.

    In JSON and in forms it is `model`; else the query's `model`. Raises `Refusal` (400).
    """
    kind = (content_type or b"").split(b";", 1)[0].strip().lower()
    name: Any = None
    parsed: dict[str, Any] | None = None
    if kind == b"multipart/form-data":
        name = _form_model(body)
    elif body:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = None
            if kind in {b"application/json", b""}:
                raise Refusal(400, "invalid_json", "The body is not JSON.") from None
        if isinstance(value, dict):
            parsed = value
            name = value.get("model")
        elif kind in {b"application/json", b""}:
            raise Refusal(400, "invalid_json", "The body is not a JSON object.")
    if name is None and query:
        found = parse_qs(query.decode("latin-1")).get("model")
        name = found[0] if found else None
    if name is None or name == "":
        raise Refusal(400, "model_missing", "The model parameter is required.", param="model")
    if not isinstance(name, str):
        raise Refusal(400, "invalid_model", "model is not a string.", param="model")
    return name, parsed


def _form_model(body: bytes) -> str | None:
    """The form field `model`; the parts before it (files) are searched past, not parsed."""
    match = _PART_NAME.search(body)
    if match is None:
        return None
    start = body.find(b"\r\n\r\n", match.end() - 2)
    end = body.find(b"\r\n", start + 4)
    if start < 0 or end < 0 or end - start > _MODEL_NAME_BYTES:
        return None
    return body[start + 4 : end].decode("utf-8", "replace")


def _too_large(limit_bytes: int) -> Refusal:
    return Refusal(
        413, "body_too_large", f"The body is larger than {limit_bytes} bytes (server.max_body)."
    )
