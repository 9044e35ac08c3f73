"""Selects the headers sent to the engine and back to the client; never hop-by-hop headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP: Final = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
_NOT_UPSTREAM: Final = HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"x-request-id",
    b"origin",  # checked by the controller
}  # fmt: skip
_NO_PLACE_FOR_KEYS: Final = frozenset(
    (
        b"accept", b"accept-encoding", b"accept-language", b"content-type", b"user-agent",
        b"traceparent", b"tracestate", b"anthropic-version", b"x-stainless-lang", b"x-stainless-os",
        b"x-stainless-arch", b"x-stainless-async", b"x-stainless-runtime", b"x-stainless-timeout",
        b"x-stainless-runtime-version", b"x-stainless-package-version",
        b"x-stainless-retry-count", b"x-stainless-read-timeout",
    )
)  # fmt: skip
"""Common headers that never have a key. Hashing each would dominate the cost of `to_engine`."""
_NOT_TO_CLIENT: Final = HOP_BY_HOP | {
    # CORS is the controller's decision, because browsers see the controller's address.
    b"access-control-allow-origin", b"access-control-allow-credentials",
    b"access-control-expose-headers", b"access-control-allow-methods",
    b"access-control-allow-headers", b"access-control-max-age",
    b"access-control-allow-private-network",
}  # fmt: skip
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def find(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Return the first value of a header, or None. `name` is in lower case, as in ASGI."""
    for key, value in headers:
        if key == name:
            return value
    return None


def to_engine(
    headers: Headers,
    *,
    api_key: str | None,
    drop_authorization: bool,
    carries_key: Callable[[bytes], bool] | None,
) -> Headers:
    """Return the headers for an engine.

    `api_key` is the engine's key. `drop_authorization`: the client's key is for the controller.
    `carries_key` returns True for a value with a key of the controller; such headers are dropped.
    It is None if no keys are configured.
    """
    dropped = _NOT_UPSTREAM
    connection = find(headers, b"connection")
    if connection is not None and connection.lower() not in {b"keep-alive", b"close"}:
        dropped = dropped | named(connection)
    if drop_authorization or api_key is not None:
        dropped = dropped | {b"authorization", b"x-api-key"}
    kept = [(key, value) for key, value in headers if key not in dropped]
    if carries_key is not None:
        kept = [(k, v) for k, v in kept if k in _NO_PLACE_FOR_KEYS or not carries_key(v)]
    if api_key is not None:
        kept.append((b"authorization", b"Bearer " + api_key.encode()))
    return kept


SANDBOX: Final[Headers] = [
    (b"content-security-policy", b"sandbox"),
    (b"x-content-type-options", b"nosniff"),
]
"""With these headers a browser runs no script of a response, and does not guess its type."""
_DATA: Final = frozenset((b"application/json", b"text/event-stream"))


def to_client(headers: Iterable[tuple[bytes, bytes]], *, is_upstream: bool = False) -> Headers:
    """Return the engine's headers for the client, without hop-by-hop and CORS headers.

    `SANDBOX` is added to everything but JSON and event streams, and to all responses below
    /upstream: a page of an engine would have the controller's origin.
    """
    kept = []
    connection = b""
    kind = b""
    for key, value in headers:
        lower = key.lower()
        if lower == b"connection":
            connection = value
        elif lower == b"content-type":
            kind = value.split(b";", 1)[0].strip().lower()
        if lower not in _NOT_TO_CLIENT:
            kept.append((lower, value))
    if connection and connection.lower() not in {b"keep-alive", b"close"}:
        dropped = named(connection)
        kept = [(key, value) for key, value in kept if key not in dropped]
    return kept if kind in _DATA and not is_upstream else [*kept, *SANDBOX]


def named(connection: bytes) -> frozenset[bytes]:
    """Return the headers that a Connection header declares hop-by-hop."""
    return frozenset(token.strip().lower() for token in connection.split(b","))


def sane_request_id(value: bytes | None) -> bytes | None:
    """Return a client's request id if it is safe for logs and the engine, else None."""
    return value if value is not None and _REQUEST_ID.fullmatch(value) else None
