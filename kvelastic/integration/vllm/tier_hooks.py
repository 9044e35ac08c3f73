"""Wrappers for vLLM's resets, sleep and weight updates, set only with tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvelastic.integration.vllm.in_tiers import EngineTiers

_KEEPS_WEIGHTS_LEVEL = 1
"""The sleep level after which the same weights are restored."""


def reset_prefix_cache(
    original: Callable[..., bool],
    scheduler: Any,
    reset_running_requests: bool = False,
    *args: Any,
    **kwargs: Any,
) -> bool:
    """Wrap the scheduler's reset: demote before a sleep, else start a new generation."""
    tiers = _tiers_of(scheduler)
    if tiers is None:
        return original(scheduler, reset_running_requests, *args, **kwargs)
    tiers.before_reset(scheduler, preempts=reset_running_requests)
    try:
        return original(scheduler, reset_running_requests, *args, **kwargs)
    finally:
        tiers.after_reset()


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


def collective_rpc(
    original: Callable[..., Any], core: Any, method: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap calls of worker methods, which may change the weights."""
    try:
        return original(core, method, *args, **kwargs)
    finally:
        tiers = _tiers_of(core.scheduler)
        if tiers is not None:
            tiers.called_workers(method)


def _tiers_of(scheduler: Any) -> EngineTiers | None:
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    return getattr(pool, "tiers", None)
