"""Wrappers for the engine core process: its loop, and the scheduler's block pool.

The executor of `executor_class` has the instance. The scheduler's block pool is an
`ElasticBlockPool`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvelastic.errors import EngineError
from kvelastic.pool.scheduling.waiting import ShortRequest

if TYPE_CHECKING:
    from kvelastic.integration.vllm.in_tiers import EngineTiers
    from kvelastic.integration.vllm.scheduler_side import Instance

_waiting_instance: Instance | None = None
"""Created before the workers start; the next block pool of this process takes it."""

_KEEPS_WEIGHTS_LEVEL = 1
"""The sleep level after which the same weights are restored."""

_has_executor = False
"""True once this process has made an executor of kvelastic's."""


def expect_pool(instance: Instance | None) -> None:
    """Let the next block pool of this process be the instance's; None: a plain one."""
    global _waiting_instance, _has_executor
    _waiting_instance, _has_executor = instance, True


def engine_core_shutdown(original: Callable[..., Any], core: Any) -> None:
    """Demote cached blocks while the workers can still copy them; then close the instance.

    After a fault, the engine ends without demoting, because its workers may hang. It then waits
    for them and kills them. SIGTERM is ignored here: it would interrupt that and leave the workers
    behind.
    """
    instance: Instance | None = getattr(core.model_executor, "kvelastic_instance", None)
    was_told_to_end = not isinstance(sys.exc_info()[1], Exception)
    with _deaf_to_sigterm():
        try:
            if was_told_to_end and instance is not None and instance.tiers is not None:
                instance.tiers.before_exit()
            original(core)
        finally:
            expect_pool(None)
            if instance is not None:
                instance.close()


@contextlib.contextmanager
def _deaf_to_sigterm() -> Iterator[None]:
    """Only in the engine core's own process; elsewhere signal handling belongs to the user."""
    is_own = multiprocessing.parent_process() is not None
    if not is_own or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- the scheduler ----------------------------------------------------------------------------


def make_block_pool(block_pool: Any, num_gpu_blocks: int, *args: Any, **kwargs: Any) -> Any:
    """Replace `BlockPool(...)` in the scheduler: return the elastic pool, once per instance.

    Raises `EngineError` if vLLM made its executor without `Executor.get_class`.
    """
    global _waiting_instance
    instance, _waiting_instance = _waiting_instance, None
    if instance is None:
        if not _has_executor:
            raise EngineError(
                "vLLM chose its executor before kvelastic was loaded, so its KV cache is not "
                "elastic. Call vllm.plugins.load_general_plugins() before "
                "Executor.get_class(), or unset ENABLE_KVELASTIC to go on without kvelastic."
            )
        return block_pool(num_gpu_blocks, *args, **kwargs)
    from kvelastic.integration.vllm.block_pool import ElasticBlockPool

    pool = ElasticBlockPool(
        num_gpu_blocks,
        *args,
        memory=instance.blocks,
        id_span=instance.id_span,
        instance_name=instance.name,
        **kwargs,
    )
    if instance.tiers is not None:
        instance.tiers.bind(pool)
    return pool


def make_blocks_needed(original: Callable[..., int]) -> Callable[..., int]:
    """Map memory before vLLM checks for free blocks; vLLM asks for every request in every step.

    Records the first request of a step that lacks memory, for operators.
    """

    def get_num_blocks_to_allocate(
        self: Any,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        needed = original(
            self,
            request_id,
            num_tokens,
            new_computed_blocks,
            num_encoder_tokens,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )
        if needed > 0:
            memory = getattr(self.block_pool, "memory", None)
            if memory is not None:
                is_short = memory.prepare(needed) < needed
                if is_short and self.block_pool.short is None:
                    none_computed: tuple[Any, ...] = ((),) * len(new_computed_blocks)

                    def count_blocks(tokens: int) -> int:
                        return original(
                            self,
                            request_id,
                            tokens,
                            none_computed,
                            num_encoder_tokens,
                            0,
                            0,
                            tokens,
                            True,
                            prefill_end,
                        )

                    self.block_pool.short = ShortRequest(request_id, count_blocks)
        return needed

    return get_num_blocks_to_allocate


def step(original: Callable[..., Any], core: Any) -> Any:
    """While all requests wait for memory, back off instead of running an empty step."""
    return ({}, False) if _backs_off(core) else original(core)


def step_with_batch_queue(original: Callable[..., Any], core: Any) -> Any:
    """Like `step`. The queue then holds only empty steps, which end with later ones."""
    return (None, False) if _backs_off(core) else original(core)


def _backs_off(core: Any) -> bool:
    """Return True if all requests wait for memory, still after a backoff.

    False if only a step can free blocks: with a connector that completes transfers in steps
    (tiers do not), and while blocks are pinned for a step.
    """
    pool = elastic_pool(core.scheduler)
    if pool is None:
        return False
    if pool.tiers is not None and pool.tiers.waits:
        return bool(pool.tiers.pause())
    if pool.backoff is None or pool.backoff.memory_wait is None:
        return False
    moves_in_steps = core.scheduler.connector is not None and pool.tiers is None
    if pool.memory.waits_for_steps and not moves_in_steps:
        return False
    still: bool = pool.backoff.memory_wait.pause()
    return still and not moves_in_steps


def elastic_pool(scheduler: Any) -> Any | None:
    """Return the scheduler's block pool, or None if it is vLLM's own."""
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    return pool if hasattr(pool, "memory") else None


# --- with tiers: a sleep's reset differs from others --------------------------------------------


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
