"""Everything that is particular to vLLM 0.32: what is patched, where, and what must hold there.

Patched, because vLLM has no hook for it:

    Executor.__init__                        refuse what is not covered yet (EngineCore.__init__
                                             runs already when vLLM loads its plugins there)
    EngineCore.shutdown                      close the instance
    Executor.initialize_from_config          make the instance; give the workers the paged layout
    kv_cache_coordinator.BlockPool (name)    the elastic block pool
    KVCacheCoordinator.get_num_blocks_to_allocate
                                             have memory mapped before vLLM checks what is free
    Scheduler.schedule                       one session of the pool
    EngineCore.step                          no spinning while nothing can run for want of memory
    vllm.v1.engine.utils.shutdown (name)     remove what a killed engine core left
    Worker.initialize_from_config            answer the one KV allocation with the arena
    Worker.shutdown                          detach

Each wrapper calls the original with the arguments it was given.
"""

from __future__ import annotations

import functools
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvelastic.integration.vllm.late_import import when_imported
from kvelastic.integration.vllm.probe import Probe
from kvelastic.integration.vllm.versions import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvelastic.integration.vllm.scheduler_side import Instance

_CORE = "vllm.v1.engine.core"
_CLIENT = "vllm.v1.engine.utils"
_WORKER = "vllm.v1.worker.gpu_worker"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_CONFIG = "vllm.v1.kv_cache_interface:KVCacheConfig"

HANDOFF = "kvelastic"
"""Attribute of a worker's `KVCacheConfig` that says where to attach; vLLM's own channel carries it
along with the configuration."""

_NAP_S = 0.01
"""How often the engine looks whether memory has come, while all requests wait for some."""
_LONGEST_STARVATION_S = 10.0
"""After this long the scheduler is asked again, whatever the figures say."""

_KILLED_WAIT_S = 5.0
"""How long a killed process may take until it is gone, at most."""

_armed = False
_waiting_instance: Instance | None = None
"""Made before the workers start; the next block pool of this process takes it."""


def arm() -> None:
    """See `versions.Adapter.arm`."""
    global _armed
    if _armed:
        return
    _armed = True
    when_imported(_CLIENT, _patch_client)
    when_imported(_CORE, _patch_engine_core)
    when_imported(_WORKER, _patch_worker)


# --- the engine core's process ------------------------------------------------------------------


def _patch_engine_core(core: ModuleType) -> None:
    _probe_engine_core()
    from vllm.v1.core import kv_cache_coordinator
    from vllm.v1.core.sched import scheduler
    from vllm.v1.executor import abstract

    _wrap(core.EngineCore, "shutdown", _engine_core_shutdown)
    _wrap(core.EngineCore, "step", _step)
    _wrap(abstract.Executor, "__init__", _executor_init)
    _wrap(abstract.Executor, "initialize_from_config", _executor_initialize)
    _wrap(kv_cache_coordinator.KVCacheCoordinator, "get_num_blocks_to_allocate", _blocks_needed)
    _wrap(scheduler.Scheduler, "schedule", _schedule)
    kv_cache_coordinator.BlockPool = _make_block_pool


def _probe_engine_core() -> None:
    probe = Probe(f"vLLM {installed_version()}")
    probe.mentions(f"{_CORE}:EngineCore.__init__", ("model_executor", "_initialize_kv_caches"))
    probe.parameters(f"{_CORE}:EngineCore.shutdown", ("self",))
    probe.parameters(f"{_CORE}:EngineCore.step", ("self",))
    probe.mentions(f"{_SCHEDULER}:Scheduler.__init__", ("requests", "finished_req_ids"))
    probe.mentions(
        f"{_CORE}:EngineCore._initialize_kv_caches",
        ("generate_scheduler_kv_cache_config", "initialize_from_config"),
    )
    executor = "vllm.v1.executor.abstract:Executor"
    probe.parameters(f"{executor}.__init__", ("self", "vllm_config"))
    probe.parameters(f"{executor}.initialize_from_config", ("self", "kv_cache_configs"))
    probe.mentions("vllm.v1.core.kv_cache_utils:generate_scheduler_kv_cache_config", ("deepcopy",))
    probe.parameters(f"{_SCHEDULER}:Scheduler.schedule", ("self",))
    probe.parameters(
        f"{_COORDINATOR}:KVCacheCoordinator.get_num_blocks_to_allocate",
        (
            "self",
            "request_id",
            "num_tokens",
            "new_computed_blocks",
            "num_encoder_tokens",
            "total_computed_tokens",
            "num_local_computed_tokens",
            "num_tokens_main_model",
        ),
    )
    probe.mentions(f"{_COORDINATOR}:KVCacheCoordinator.__init__", ("BlockPool", "num_blocks"))
    probe.mentions(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        ("get_num_blocks_to_allocate", "get_num_free_blocks", "allocate_new_blocks"),
    )
    probe.holds(
        f"{_COORDINATOR}:BlockPool",
        probe.get(f"{_COORDINATOR}:BlockPool") is probe.get(_POOL),
        "the class of block_pool.py",
        probe.get(f"{_COORDINATOR}:BlockPool"),
    )
    _probe_block_pool(probe)
    _probe_cache_config(probe)
    probe.refuse_if_broken()


def _probe_block_pool(probe: Probe) -> None:
    arguments = (
        "self",
        "num_gpu_blocks",
        "enable_caching",
        "hash_block_size",
        "enable_kv_cache_events",
        "metrics_collector",
    )
    probe.parameters(f"{_POOL}.__init__", arguments)
    probe.parameters(f"{_POOL}.get_new_blocks", ("self", "num_blocks"))
    probe.parameters(f"{_POOL}.touch", ("self", "blocks"))
    probe.parameters(f"{_POOL}.free_blocks", ("self", "ordered_blocks"))
    probe.parameters(f"{_POOL}.unpin_blocks", ("self", "blocks", "on_reuse"))
    probe.parameters(f"{_POOL}.evict_blocks", ("self", "block_ids"))
    probe.parameters(f"{_POOL}.reset_prefix_cache", ("self",))
    probe.parameters(f"{_POOL}.get_num_free_blocks", ("self",))
    probe.parameters(f"{_POOL}.get_usage", ("self",))
    probe.parameters(f"{_POOL}._maybe_evict_cached_block", ("self", "block"))
    probe.parameters(f"{_POOL}.move_block_hashes", ("self", "src_block", "dst_block"))
    probe.parameters(f"{_POOL}._notify_reuse", ("self", "blocks"))
    # Everything that uses what the elastic pool does not have is replaced by it.
    probe.users(
        _POOL,
        "free_block_queue",
        (
            "__init__",
            "get_new_blocks",
            "touch",
            "free_blocks",
            "unpin_blocks",
            "get_num_free_blocks",
        ),
    )
    probe.users(_POOL, "blocks", ("__init__", "evict_blocks", "reset_prefix_cache"))
    probe.users(_POOL, "num_gpu_blocks", ("__init__", "reset_prefix_cache", "get_usage"))
    probe.fields(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        ("block_id", "ref_cnt", "pool", "_block_hash", "is_null"),
    )


def _probe_cache_config(probe: Probe) -> None:
    probe.fields(_CONFIG, ("num_blocks", "kv_cache_tensors", "kv_cache_groups"))
    probe.fields(
        "vllm.v1.kv_cache_interface:KVCacheTensor",
        ("size", "layers", "layer_stride", "block_stride", "offset", "host_resident"),
    )
    probe.parameters(
        "vllm.v1.kv_cache_interface:create_kv_cache_views",
        ("raw", "spec", "num_blocks", "layout", "kv_cache_tensor", "kernel_block_size"),
    )


def _executor_init(
    original: Callable[..., Any], executor: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    from kvelastic.integration.vllm.refusals import refuse_configuration

    refuse_configuration(vllm_config)
    original(executor, vllm_config, *args, **kwargs)


def _engine_core_shutdown(original: Callable[..., Any], core: Any) -> None:
    executor = core.model_executor
    try:
        original(core)
    finally:
        _close_instance(executor)


def _executor_initialize(
    original: Callable[..., Any], executor: Any, kv_cache_configs: list[Any]
) -> None:
    from kvelastic.integration.vllm import scheduler_side
    from kvelastic.integration.vllm.refusals import refuse_cache_configuration

    global _waiting_instance
    if not any(config.kv_cache_tensors for config in kv_cache_configs):
        original(executor, kv_cache_configs)  # a model without attention has no KV cache
        return
    for config in kv_cache_configs:
        refuse_cache_configuration(config)
    vllm_config = executor.vllm_config
    instance = scheduler_side.start_instance(vllm_config, kv_cache_configs[0])
    try:
        for config in kv_cache_configs:
            instance.rewrite(config)
            setattr(config, HANDOFF, instance.handoff())
        original(executor, kv_cache_configs)
        instance.wait_for_workers()
    except BaseException:
        instance.close()
        raise
    executor.kvelastic_instance = instance
    # In one process with its worker, the scheduler would read the span of ids here.
    vllm_config.cache_config.num_gpu_blocks = instance.num_blocks
    _waiting_instance = instance


def _make_block_pool(num_gpu_blocks: int, *args: Any, **kwargs: Any) -> Any:
    """What `BlockPool(...)` means in the scheduler: the elastic one, once for each instance."""
    from vllm.v1.core.block_pool import BlockPool

    from kvelastic.integration.vllm.block_pool import ElasticBlockPool

    global _waiting_instance
    instance, _waiting_instance = _waiting_instance, None
    if instance is None:
        return BlockPool(num_gpu_blocks, *args, **kwargs)
    return ElasticBlockPool(
        num_gpu_blocks,
        *args,
        memory=instance.blocks,
        id_span=instance.id_span,
        **kwargs,
    )


def _close_instance(executor: Any) -> None:
    global _waiting_instance
    _waiting_instance = None
    instance: Instance | None = getattr(executor, "kvelastic_instance", None)
    if instance is not None:
        instance.close()


def _blocks_needed(
    original: Callable[..., Any], coordinator: Any, *args: Any, **kwargs: Any
) -> int:
    needed: int = original(coordinator, *args, **kwargs)
    prepare = getattr(coordinator.block_pool, "prepare", None)
    if needed > 0 and prepare is not None:
        prepare(needed)
    return needed


def _schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    pool = _elastic_pool(scheduler)
    if pool is None:
        return original(scheduler, *args, **kwargs)
    pool.headroom = scheduler.kv_cache_manager.watermark_blocks
    with pool.session():
        output = original(scheduler, *args, **kwargs)
    starved = pool.fell_short and output.total_num_scheduled_tokens == 0
    pool.starvation = _Starvation(scheduler) if starved else None
    return output


def _step(original: Callable[..., Any], core: Any) -> Any:
    """vLLM's loop runs on and on while requests wait, and so keeps its worker's core busy too."""
    pool = _elastic_pool(core.scheduler)
    if pool is None or pool.starvation is None or pool.starvation.is_over():
        return original(core)
    time.sleep(_NAP_S)
    return {}, False


def _elastic_pool(scheduler: Any) -> Any | None:
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    return pool if hasattr(pool, "prepare") else None


class _Starvation:
    """Nothing could be scheduled for want of blocks, and nothing has changed since."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._figures = self._read()
        self._end_s = time.monotonic() + _LONGEST_STARVATION_S

    def is_over(self) -> bool:
        """Whether to ask the scheduler again."""
        return self._read() != self._figures or time.monotonic() >= self._end_s

    def _read(self) -> tuple[object, ...]:
        scheduler = self._scheduler
        return (
            scheduler.kv_cache_manager.block_pool.available_size(),
            len(scheduler.requests),
            len(scheduler.finished_req_ids),
            scheduler.pause_state,
        )


# --- the process that started the engine core (the API server) ------------------------------------


def _patch_client(utils: ModuleType) -> None:
    probe = Probe(f"vLLM {installed_version()}")
    probe.parameters(f"{_CLIENT}:shutdown", ("procs", "timeout"))
    probe.mentions(f"{_CLIENT}:CoreEngineProcManager.__init__", ("shutdown",))
    probe.refuse_if_broken()
    if not hasattr(utils.shutdown, "kvelastic_original"):
        utils.shutdown = _marked(  # type: ignore[attr-defined]
            utils.shutdown, _shutdown_engine_cores
        )


def _shutdown_engine_cores(
    original: Callable[..., Any], procs: list[Any], *args: Any, **kwargs: Any
) -> None:
    """vLLM gives its engine core no time to end (--shutdown-timeout 0) and kills it."""
    try:
        original(procs, *args, **kwargs)
    finally:
        from kvelastic import segment

        for process in procs:
            process.join(_KILLED_WAIT_S)
        segment.reap()
        _leave_ledgers({process.pid for process in procs})


def _leave_ledgers(engine_cores: set[int]) -> None:
    """A member lives as long as its worker, which ends a moment after a killed engine core."""
    from kvelastic import ledger

    end_s = time.monotonic() + _KILLED_WAIT_S
    while True:
        ledger.reap()
        members = {member.pid for info in ledger.list_ledgers() for member in info.members}
        if not members & engine_cores or time.monotonic() >= end_s:
            return
        time.sleep(_NAP_S)


# --- a worker's process -------------------------------------------------------------------------


def _patch_worker(worker: ModuleType) -> None:
    probe = Probe(f"vLLM {installed_version()}")
    probe.parameters(f"{_WORKER}:Worker.initialize_from_config", ("self", "kv_cache_config"))
    probe.parameters(f"{_WORKER}:Worker.shutdown", ("self",))
    probe.parameters(
        "vllm.v1.worker.utils:allocate_kv_cache", ("kv_cache_config", "device", "layout")
    )
    probe.mentions("vllm.v1.worker.utils:allocate_kv_cache", ("zeros", "int8", "size"))
    probe.refuse_if_broken()
    _wrap(worker.Worker, "initialize_from_config", _worker_initialize)
    _wrap(worker.Worker, "shutdown", _worker_shutdown)


def _worker_initialize(original: Callable[..., Any], worker: Any, kv_cache_config: Any) -> None:
    handoff = getattr(kv_cache_config, HANDOFF, None)
    if handoff is None:
        original(worker, kv_cache_config)
        return
    from kvelastic.integration.vllm import worker_side

    memory = worker_side.attach(handoff)
    worker.kvelastic_memory = memory
    with memory.as_kv_allocation():
        original(worker, kv_cache_config)
    memory.check_views(worker.model_runner.kv_caches, kv_cache_config.num_blocks)


def _worker_shutdown(original: Callable[..., Any], worker: Any) -> None:
    try:
        original(worker)
    finally:
        memory = getattr(worker, "kvelastic_memory", None)
        if memory is not None:
            memory.close()


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(original, self, ...)`, once."""
    original = getattr(owner, name)
    if not hasattr(original, "kvelastic_original"):
        setattr(owner, name, _marked(original, wrapper))


def _marked(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    patched.kvelastic_original = original  # type: ignore[attr-defined]
    return patched
