"""Wrappers that distinguish a sleep's reset from others, set only with tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvelastic.integration.vllm.in_engine_core import elastic_pool

if TYPE_CHECKING:
    from kvelastic.integration.vllm.in_tiers import EngineTiers

_KEEPS_WEIGHTS_LEVEL = 1
"""The sleep level after which the same weights are restored."""


def reset_caches(original: Callable[..., None], core: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the engine core's `_reset_caches`, which a sleep and a pause call."""
    tiers = _tiers_of(core.scheduler)
    if tiers is None:
        original(core, *args, **kwargs)
        return
    with tiers.resetting_all():
        original(core, *args, **kwargs)


def sleep(
    original: Callable[..., Any], core: Any, level: int = 1, *args: Any, **kwargs: Any
) -> Any:
    """Mark the next reset as a sleep's. It happens now, or once requests have ended."""
    tiers = _tiers_of(core.scheduler)
    if tiers is not None:
        tiers.sleeps = level == _KEEPS_WEIGHTS_LEVEL
    try:
        return original(core, level, *args, **kwargs)
    except BaseException:
        if tiers is not None:
            tiers.sleeps = False
        raise


def release_kv_cache_memory(original: Callable[..., None], core: Any) -> None:
    """Wrap a sleep of the KV cache alone."""
    tiers = _tiers_of(core.scheduler)
    if tiers is not None:
        tiers.sleeps = True
    try:
        original(core)
    finally:
        if tiers is not None:
            tiers.sleeps = False


def _tiers_of(scheduler: Any) -> EngineTiers | None:
    return getattr(elastic_pool(scheduler), "tiers", None)
