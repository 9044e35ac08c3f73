"""API keys: authorize the use of models, and changes.

Only digests are kept, and a presented key is looked up by its digest. The lookup time reveals
nothing about a key: a client cannot choose the first digits of a digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from kvelastic.controller.http.engine_paths import ModelPaths
from kvelastic.controller.http.headers import Headers, find
from kvelastic.controller.http.origins import Origins
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.settings.settings import AuthSettings
from kvelastic.units import MAX_PRIORITY

_ID_DIGITS: Final = 8


@dataclass(frozen=True)
class Key:
    """The identity of a client."""

    id: str | None
    """The first digits of the key's SHA-256; None without a key."""
    name: str | None
    """The name given in the configuration."""
    is_admin: bool
    max_priority: int
    """Upper bound of its requests' priority; a higher one is lowered to it."""


class Keys:
    """The keys of one configuration, and the checks of requests without a key."""

    def __init__(self, settings: AuthSettings, origins: Origins) -> None:
        self.model_paths = ModelPaths(settings.model_paths)
        """The engines' paths that need only `check_api`."""
        self._origins = origins
        self._has_api = bool(settings.api_keys)
        self._has_admin = bool(settings.admin_keys)
        self._by_digest: dict[bytes, Key] = {}
        for api in settings.api_keys:
            own = api.max_priority
            bound = settings.max_priority if own is None else own
            self._by_digest[api.digest] = Key(_id(api.digest), api.name, False, bound)
        for admin in settings.admin_keys:
            self._by_digest[admin.digest] = Key(_id(admin.digest), admin.name, True, MAX_PRIORITY)
        is_open = not self._by_digest
        self._nobody = Key(None, None, is_open, MAX_PRIORITY if is_open else settings.max_priority)

    @property
    def has_api_keys(self) -> bool:
        """True if API keys are configured. A bearer token is then always for the controller."""
        return self._has_api

    def __bool__(self) -> bool:
        """Return True if any key is configured."""
        return bool(self._by_digest)

    def carries_key(self, value: bytes) -> bool:
        """Return True if a header's value is a key of this controller, with or without a scheme."""
        if _digest(value.strip()) in self._by_digest:
            return True
        words = value.split(None, 1)
        return len(words) == 2 and _digest(words[1].rstrip()) in self._by_digest

    def identify(self, headers: Headers) -> Key | None:
        """Return the known key that a request presents, or None."""
        if not self._by_digest:
            return None
        value = find(headers, b"authorization")
        if value is not None:
            scheme, _, presented = value.partition(b" ")
            if scheme.lower() == b"bearer":
                key = self._by_digest.get(_digest(presented.strip()))
                if key is not None:
                    return key
        value = find(headers, b"x-api-key")  # as Anthropic's clients send it
        return None if value is None else self._by_digest.get(_digest(value.strip()))

    def check_api(self, headers: Headers) -> Key:
        """Authorize the use of models and reads; return the key. Raises `Refusal` (401, 403)."""
        key = self.identify(headers)
        if key is not None:
            return key
        if self._has_api:
            raise Refusal(401, "invalid_api_key", "A valid key is needed: Authorization: Bearer.")
        self._origins.check(headers, own_pages_only=False)
        return self._nobody

    def check_admin(self, headers: Headers) -> Key:
        """Authorize sleep, wake, reload and changes of memory; return the key.

        Raises `Refusal` (401, 403).
        """
        key = self.identify(headers)
        if key is not None and key.is_admin:
            return key
        if self._has_admin:
            if key is not None:
                raise Refusal(
                    403, "admin_key_needed", "This key is for models; an admin key is needed."
                )
            raise Refusal(401, "invalid_api_key", "An admin key is needed: Authorization: Bearer.")
        if self._has_api:
            raise Refusal(
                403,
                "no_admin_keys",
                "This operation needs an admin key, and auth.admin_keys has none.",
            )
        self._origins.check(headers, own_pages_only=True)
        return self._nobody


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _id(digest: bytes) -> str:
    return digest.hex()[:_ID_DIGITS]
