"""Keys: who may use models, and who may change things.

Only digests of keys are kept, and a key that is presented is compared with all of them, each in
constant time: how long an answer takes says nothing about how much of a key was right.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import Any
from urllib.parse import urlsplit

from kvelastic.controller.headers import Headers, find
from kvelastic.controller.refusal import Refusal
from kvelastic.controller.settings import AuthSettings, is_loopback

_log = logging.getLogger("kvelastic.controller")


class Keys:
    """The keys of one configuration."""

    def __init__(self, settings: AuthSettings) -> None:
        self._api = tuple(_digest(key) for key in settings.api_keys)
        self._admin = tuple(_digest(key) for key in settings.admin_keys)
        plain = [
            key
            for key in (*settings.api_keys, *settings.admin_keys)
            if not key.startswith("sha256:")
        ]
        if plain:
            _log.warning(
                "%d keys stand in the configuration as they are; write sha256:HEX of them"
                " (printf %%s KEY | sha256sum), or ${ENV_NAME}",
                len(plain),
            )

    @property
    def has_api_keys(self) -> bool:
        """Whether a client's bearer token is meant for the controller."""
        return bool(self._api)

    def check_api(self, headers: Headers, scope: Any) -> None:
        """Let it use models and read. Raises `Refusal` (401, 403)."""
        if not self._api:
            if not self._admin:
                check_is_local(headers, scope)
            return
        if not _matches(_presented(headers), self._api + self._admin):
            raise Refusal(401, "invalid_api_key", "A valid key is needed: Authorization: Bearer.")

    def check_admin(self, headers: Headers, scope: Any) -> None:
        """Let it sleep, wake, reload and change memory. Raises `Refusal` (401, 403)."""
        if not self._admin:
            if self._api:
                raise Refusal(
                    403, "no_admin_keys", "Nobody may do that: auth.admin_keys has no key."
                )
            check_is_local(headers, scope)
            return
        presented = _presented(headers)
        if _matches(presented, self._admin):
            return
        if _matches(presented, self._api):
            raise Refusal(
                403, "admin_key_needed", "This key is for models; an admin key is needed."
            )
        raise Refusal(401, "invalid_api_key", "An admin key is needed: Authorization: Bearer.")


def check_is_local(headers: Headers, scope: Any) -> None:
    """Without keys: no page of another site in this machine's browser may ask. Raises `Refusal`.

    A browser names the page's origin, and sends the name that it looked up as Host: a name that
    was made to lead to 127.0.0.1 is not this machine's.
    """
    host = find(headers, b"host")
    if host is not None and scope.get("scheme") in {"http", "https"}:
        name = urlsplit("//" + host.decode("latin-1")).hostname if _can_split(host) else None
        if name is None or not is_loopback(name):
            raise Refusal(
                403, "foreign_host", "Without keys only requests to localhost are served."
            )
    origin = find(headers, b"origin")
    if origin is not None and origin.rpartition(b"://")[2] != host:
        raise Refusal(403, "foreign_origin", "Requests of other sites' pages are not served.")


def _can_split(host: bytes) -> bool:
    try:
        urlsplit("//" + host.decode("latin-1"))
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    if key.startswith("sha256:"):
        return bytes.fromhex(key.removeprefix("sha256:"))
    return hashlib.sha256(key.encode()).digest()


def _presented(headers: Headers) -> bytes:
    value = find(headers, b"authorization")
    if value is not None:
        scheme, _, key = value.partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else b""
    return find(headers, b"x-api-key") or b""  # as Anthropic's clients send it


def _matches(presented: bytes, digests: tuple[bytes, ...]) -> bool:
    mine = hashlib.sha256(presented).digest()
    found = False
    for digest in digests:
        found |= hmac.compare_digest(mine, digest)
    return found
