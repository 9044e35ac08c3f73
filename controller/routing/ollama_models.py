"""Models in the format of Ollama's lists: pure functions over plain values.

The controller does not know a model's weights. So the digest is of the name, and the size is the
memory that the model takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Final

_NEVER: Final = datetime(2318, 1, 1, tzinfo=timezone.utc)
"""Expiry of a model that never expires: about Ollama's own value for -1, shown as "forever"."""
LATEST: Final = ":latest"


@dataclass(frozen=True)
class Listed:
    """One model of a list."""

    name: str
    since: datetime
    """Time at which the controller began to serve it."""
    bytes: int = 0
    """Device memory that it takes while awake; 0 if unknown."""
    expires_in_s: float | None = None
    """Seconds until it is put to sleep if no request comes; None: never."""
    capabilities: tuple[str, ...] = ()
    """The configured capabilities. The controller does not read the model's files."""


def names_of(asked: str) -> tuple[str, ...]:
    """Return the names to look up. Clients append `:latest` to a name without a tag."""
    return (asked, asked.removesuffix(LATEST)) if asked.endswith(LATEST) else (asked,)


def tags(models: Collection[Listed]) -> dict[str, Any]:
    """Return the body of /api/tags."""
    return {"models": [{**_entry(m), "modified_at": timestamp(m.since)} for m in models]}


def running(models: Collection[Listed], now: datetime) -> dict[str, Any]:
    """Return the body of /api/ps for models that are awake."""
    return {
        "models": [
            {**_entry(m), "size_vram": m.bytes, "expires_at": timestamp(_expiry(m, now))}
            for m in models
        ]
    }


def shown(model: Listed) -> dict[str, Any]:
    """Return the body of /api/show. The model's details are empty: only its engine knows them."""
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "license": "",
        "modified_at": timestamp(model.since),
        "details": _details(),
        "model_info": {"general.architecture": "", "general.basename": model.name},
        "capabilities": list(model.capabilities),
    }


def timestamp(at: datetime) -> str:
    """Return a time in Go's format: RFC 3339, UTC."""
    return at.astimezone(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _expiry(model: Listed, now: datetime) -> datetime:
    if model.expires_in_s is None or model.expires_in_s > (_NEVER - now).total_seconds():
        return _NEVER
    return now + timedelta(seconds=max(0.0, model.expires_in_s))


def _entry(model: Listed) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "size": model.bytes,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": _details(),
    }


def _details() -> dict[str, Any]:
    """Return the fields that Ollama reads from a model's file, all empty."""
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": None,
        "parameter_size": "",
        "quantization_level": "",
    }
