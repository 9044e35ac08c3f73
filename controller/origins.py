"""Host and Origin: which names this controller goes by, and which web pages may use it.

A browser sends the requests of any page to any address, also to 127.0.0.1. It names the page's
origin, and as Host the name that it has looked up: a name that was made to lead to 127.0.0.1 is not
one of ours. Where no key is asked for, that is all there is to tell an operator's own requests
from those of a page. Pages that are named in `server.allowed_origins` may read answers (CORS).
"""

from __future__ import annotations

import re
from typing import Any, Final

from kvelastic.controller.headers import Headers, find
from kvelastic.controller.refusal import Refusal
from kvelastic.controller.settings import ServerSettings, is_loopback

_HOST: Final = re.compile(rb"([a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
_MAX_AGE_S: Final = 600


class Origins:
    """What one configuration says of hosts and origins."""

    def __init__(self, server: ServerSettings) -> None:
        # The usual ones beside: looking at a number as an address takes longer than all else here.
        self._hosts = frozenset(("localhost", "127.0.0.1", "[::1]", *server.allowed_hosts))
        self._allowed = frozenset(origin.encode() for origin in server.allowed_origins)

    @property
    def allows_any(self) -> bool:
        """Whether there are pages elsewhere that may read answers: `cors` has to be asked."""
        return bool(self._allowed)

    def check(self, headers: Headers, *, own_pages_only: bool) -> None:
        """No page that is not allowed may ask without a key. Raises `Refusal` (403).

        `own_pages_only`: those of `server.allowed_origins` may not either.
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
            # What a page includes (an image, say) comes without an Origin, but browsers mark it.
            if site not in {None, b"none", b"same-origin"}:
                raise _foreign_origin()
            return
        is_own = host is not None and origin in {b"http://" + host, b"https://" + host}
        if not is_own and (own_pages_only or origin not in self._allowed):
            raise _foreign_origin()

    def cors(self, headers: Headers) -> Headers:
        """What an answer says to the browser of whoever asked."""
        if not self._allowed:
            return []
        # Also where no page asked: a cache must not answer one page with what it kept for another.
        said = [(b"vary", b"origin")]
        origin = find(headers, b"origin")
        if origin in self._allowed:
            said.append((b"access-control-allow-origin", origin))
            said.append((b"access-control-expose-headers", b"*"))
        return said

    def preflight(self, scope: Any) -> Headers | None:
        """The headers of the answer to a browser's preflight request; None if this is not one.

        It comes without a key, whatever the request itself will have.
        """
        headers: Headers = scope["headers"]
        if scope["method"] != "OPTIONS" or find(headers, b"origin") not in self._allowed:
            return None
        if find(headers, b"access-control-request-method") is None:
            return None
        said = [
            (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
            (b"access-control-max-age", str(_MAX_AGE_S).encode()),
        ]
        wanted = find(headers, b"access-control-request-headers")
        if wanted is not None:
            said.append((b"access-control-allow-headers", wanted))
        if find(headers, b"access-control-request-private-network") == b"true":
            said.append((b"access-control-allow-private-network", b"true"))
        return said

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
