"""Reads the JSON body of requests to the controller's own routes, key by key.

    body = await json_object(app_state, request)
    check_keys(body, "limit", "wait")
    size_of(body, "limit"), wait_of(body)

An invalid value raises `Refusal` (400) with the name of the key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.request_body import read_body
from kvelastic.errors import InvalidArgumentError
from kvelastic.units import MAX_SIZE_BYTES, parse_age_s, parse_duration_s, parse_size

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

MOST_WAIT_S: Final = 600.0


async def json_object(app_state: AppState, request: Request) -> dict[str, Any]:
    """Return the request's body as a JSON object; an empty body is {}. Raises `Refusal`."""
    server = app_state.settings.server
    body = await read_body(
        request.receive,
        None,
        min(server.max_body, 1 << 20),
        server.body_timeout,
        app_state.forwarder.budget,
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


def check_keys(body: dict[str, Any], *known: str) -> None:
    """Raise `Refusal` (400) for an unknown key, which may be a typing error."""
    for key in sorted(set(body) - set(known)):
        names = " or ".join(filter(None, [", ".join(known[:-1]), known[-1]]))
        raise Refusal(400, "unknown_key", f"{key[:100]!r} is not {names}.", param=key[:100])


def size_of(body: dict[str, Any], key: str) -> int | None:
    """Return a size in bytes, given as bytes or text like `512M`; None if the key is absent.

    Raises `Refusal` (400).
    """
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return parse_size(value)
        except InvalidArgumentError as error:
            raise Refusal(400, error.code, str(error), param=key) from None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE_BYTES:
        raise Refusal(
            400, "invalid_value", f"{key} is a number of bytes, or text like 512M.", param=key
        )
    return value


def age_of(body: dict[str, Any], key: str) -> float | None:
    """Return an age in seconds; None if the key is absent. Raises `Refusal` (400)."""
    return _time_of(body, key, parse_age_s)


def _time_of(body: dict[str, Any], key: str, parse: Callable[[object], float]) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    try:
        return parse(value)
    except InvalidArgumentError as error:
        raise Refusal(400, error.code, str(error), param=key) from None


def wait_of(body: dict[str, Any]) -> float | None:
    """Return the `wait` for the outcome in seconds, or None; at most `MOST_WAIT_S`.

    Raises `Refusal` (400).
    """
    wait_s = _time_of(body, "wait", parse_duration_s)
    if wait_s is not None and wait_s > MOST_WAIT_S:
        raise Refusal(400, "invalid_value", f"wait is at most {MOST_WAIT_S:g} s.", param="wait")
    return wait_s
