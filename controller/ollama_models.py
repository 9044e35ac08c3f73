"""Models as Ollama lists them: pure functions over plain values.

A digest stands for the name: no weights are known here. So does the size, which is of memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Final

_NEVER: Final = datetime(2318, 1, 1, tzinfo=timezone.utc)
"""When a model expires that stays: about where Ollama's own -1 ends, and clients say "for ever"."""
LATEST: Final = ":latest"


@dataclass(frozen=True)
class Listed:
    """One model."""

    name: str
    engine: str
    since: datetime
    """When the controller began to serve it."""
    bytes: int = 0
    """What it takes of its device while it is awake, as far as that is known."""
    expires_in_s: float | None = None
    """Until it is put to sleep by time, if nobody asks; None: never."""
    capabilities: tuple[str, ...] = ()
    """As the configuration says: the controller has not seen the model's files."""


def names_of(asked: str) -> tuple[str, ...]:
    """What a client may mean: clients add a tag to names that have none."""
    return (asked, asked.removesuffix(LATEST)) if asked.endswith(LATEST) else (asked,)


def tags(models: Collection[Listed]) -> dict[str, Any]:
    """All that are served."""
    return {"models": [{**_entry(m), "modified_at": timestamp(m.since)} for m in models]}


def running(models: Collection[Listed], now: datetime) -> dict[str, Any]:
    """Those that are awake."""
    return {
        "models": [
            {**_entry(m), "size_vram": m.bytes, "expires_at": timestamp(_expiry(m, now))}
            for m in models
        ]
    }


def shown(model: Listed) -> dict[str, Any]:
    """One of them. What its engine knows of it is asked of the engine, not of the controller."""
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
    """As Go prints it: RFC 3339, in UTC."""
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
    """What Ollama reads out of a model's file."""
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": None,
        "parameter_size": "",
        "quantization_level": "",
    }
