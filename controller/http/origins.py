"""Checks of Host and Origin: the controller's names, and the web pages that may use it.

A browser sends requests of any page to any address, including 127.0.0.1. Its Origin header is the
page's origin, and Host is the name that it resolved. A foreign name that resolves to 127.0.0.1 (DNS
rebinding) is not accepted. Without keys these headers are the only way to distinguish an operator's
requests from those of a page. Pages in `server.allowed_origins` may read responses (CORS).
"""

from __future__ import annotations

import re
from typing import Any, Final

from kvelastic.address import is_loopback
from kvelastic.controller.http.headers import Headers, find
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.settings.settings import ServerSettings

_HOST: Final = re.compile(rb"([a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
_MAX_AGE_S: Final = 600


class Origins:
    """The accepted hosts and origins of one configuration."""

    def __init__(self, server: ServerSettings) -> None:
        # Include the usual names, because parsing an address would dominate the cost of `check`.
        self._hosts = frozenset(("localhost", "127.0.0.1", "[::1]", *server.allowed_hosts))
        self._allowed = frozenset(origin.encode() for origin in server.allowed_origins)

    @property
    def allows_any(self) -> bool:
        """True if pages of other origins may read responses, so `cors` is needed."""
        return bool(self._allowed)

    def check(self, headers: Headers, *, own_pages_only: bool) -> None:
        """Check a request without a key. Raises `Refusal` (403) for a page that is not allowed.

        `own_pages_only`: refuse pages of `server.allowed_origins` too.
        """
        host = origin = site = None
        for name, value in headers:
            if name == b"host":
                if host is not None:
                    raise _foreign_host()
                host = value.lower()
            elif name == b"origin":
                if origin is not None:
                    raise _foreign_origin()
                origin = value
            elif name == b"sec-fetch-site":
                site = value
        if host is not None and not self._is_ours(host):
            raise _foreign_host()
        if origin is None:
            # Subresources such as images have no Origin, but browsers set Sec-Fetch-Site.
            if site not in {None, b"none", b"same-origin"}:
                raise _foreign_origin()
            return
        is_own = host is not None and origin in {b"http://" + host, b"https://" + host}
        if not is_own and (own_pages_only or origin not in self._allowed):
            raise _foreign_origin()

    def cors(self, headers: Headers) -> Headers:
        """Return the CORS headers of the response to a request with these headers."""
        if not self._allowed:
            return []
        # Always: a cache must not serve one page a response that was stored for another.
        headers_out = [(b"vary", b"origin")]
        origin = find(headers, b"origin")
        if origin in self._allowed:
            headers_out.append((b"access-control-allow-origin", origin))
            headers_out.append((b"access-control-expose-headers", b"*"))
        return headers_out

    def preflight(self, scope: Any) -> Headers | None:
        """Return the response headers for a browser's preflight request; None if it is not one.

        A preflight request has no key, even if the actual request has one.
        """
        headers: Headers = scope["headers"]
        if scope["method"] != "OPTIONS" or find(headers, b"origin") not in self._allowed:
            return None
        if find(headers, b"access-control-request-method") is None:
            return None
        headers_out = [
            (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
            (b"access-control-max-age", str(_MAX_AGE_S).encode()),
        ]
        wanted = find(headers, b"access-control-request-headers")
        if wanted is not None:
            headers_out.append((b"access-control-allow-headers", wanted))
        if find(headers, b"access-control-request-private-network") == b"true":
            headers_out.append((b"access-control-allow-private-network", b"true"))
        return headers_out

    def _is_ours(self, host: bytes) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].decode()
        if name in self._hosts:
            return True
        return is_loopback(name[1:-1]) if name[0] == "[" and ":" in name else is_loopback(name)


def _foreign_host() -> Refusal:
    return Refusal(
        403,
        "foreign_host",
        "Without a key only requests to localhost, or to a name in server.allowed_hosts, are"
        " served.",
    )


def _foreign_origin() -> Refusal:
    return Refusal(
        403,
        "foreign_origin",
        "Without a key a web page of another site is served only if server.allowed_origins names"
        " it, and then not for what changes things.",
    )
