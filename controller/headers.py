"""Which headers go on to the engine, and which come back: hop-by-hop ones do neither."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_NOT_UPSTREAM: Final = HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"x-request-id",
    b"origin",  # whether that page may ask was settled here
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
"""What all clients send: a digest of each would cost more than all else here."""
_NOT_TO_CLIENT: Final = HOP_BY_HOP | {
    # Which pages may read an answer is said by whoever has the address that they asked.
    b"access-control-allow-origin", b"access-control-allow-credentials",
    b"access-control-expose-headers", b"access-control-allow-methods",
    b"access-control-allow-headers", b"access-control-max-age",
    b"access-control-allow-private-network",
}  # fmt: skip
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def find(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of a header; `name` in lower case, as ASGI has them."""
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
    """What an engine gets.

    `drop_authorization`: the client's key was meant for the controller. `carries_key` says of a
    value that it is a key of the controller; such a header never goes on. None: there are no keys.
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
"""A browser runs no script of such an answer, and takes it for what it is called."""
_DATA: Final = frozenset((b"application/json", b"text/event-stream"))


def to_client(headers: Iterable[tuple[bytes, bytes]], *, is_upstream: bool = False) -> Headers:
    """What a client gets of an engine's headers, as they came: not hop-by-hop ones, nor CORS.

    Whatever is no data gets `SANDBOX` besides, and all that comes from below /upstream: a page of
    an engine would be of our own origin.
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
    """The headers that a Connection header declares hop-by-hop."""
    return frozenset(token.strip().lower() for token in connection.split(b","))


def sane_request_id(value: bytes | None) -> bytes | None:
    """A client's request id if it can go into logs and on to the engine; else None."""
    return value if value is not None and _REQUEST_ID.fullmatch(value) else None
