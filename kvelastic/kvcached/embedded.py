"""kvelastic inside one process: the state behind kvcached's functions.

    init("vllm", device="cpu", ...); tensors = alloc_kv_cache(...)
    manager = get_kv_cache_manager(...); shutdown_kvelastic()

A *group* is one cache shape with its tensors and manager; most models have only group 0. Each group
is a separate instance: a segment, a limit, a line in `kvctl list`. All functions are thread-safe; a
lock serializes them.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvelastic import _vmm, engines
from kvelastic.config import Config, configure_logging, load
from kvelastic.device.selection import Device, means_host, resolve
from kvelastic.errors import (
    InvalidArgumentError,
    LayoutError,
    NotInitializedError,
    UnsupportedError,
)
from kvelastic.kvcached.manager import KVCacheManager
from kvelastic.kvcached.snapshots import SCHEMA_VERSION, KVCachePoolSnapshot, RuntimeSnapshot
from kvelastic.logs import log_once
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import ElasticPool, local_range, open_pool
from kvelastic.pool.tensor_views import CachePlan, plan, plan_states, state_view
from kvelastic.shared import device_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass
class _Group:
    """One cache: its pool and the arguments of its creation."""

    pool: ElasticPool
    layout: PageLayout
    pages: int
    num_blocks: int
    manager: KVCacheManager | None = None


@dataclass
class _State:
    """Arguments of `init`; exists from init to shutdown."""

    engine: str
    """Its name in `kvelastic.engines`."""
    settings: Config
    device: Device
    reserve_bytes: int = 0
    """Device memory of this process besides its caches, in bytes; reserved by its first group."""
    is_worker: bool = False
    async_sched: bool = False
    """`is_worker` and `async_sched` have no effect; snapshots show them."""
    groups: dict[int, _Group] = field(default_factory=dict)

    @property
    def page_size_bytes(self) -> int:
        """Page size in bytes from which layouts start."""
        return device_set.page_size_bytes(self.settings, [self.device])


_lock = threading.RLock()
_state: _State | None = None


def init(
    engine: str,
    *,
    tp_rank: int,
    world_size: int,
    pp_rank: int,
    device: str | None,
    is_worker: bool = False,
    async_sched: bool = False,
) -> None:
    """Initialize this process. A second call with the same arguments changes nothing.

    Raises `UnsupportedError` for more than one rank, or if a second call names another engine or
    device; `DeviceUnavailableError` for a GPU that is not available; `ConfigError` for a variable
    with an invalid value.
    """
    global _state
    with _lock:
        if world_size != 1 or tp_rank != 0 or pp_rank != 0:
            raise UnsupportedError(
                f"tp_rank={tp_rank}, world_size={world_size}, pp_rank={pp_rank} is not supported:"
                " a process manages the cache of one worker. Either call it in the process of each"
                " rank with tp_size=1: each is an instance then, with its own limit and block ids."
                " Or serve with vLLM and ENABLE_KVELASTIC=true, where one scheduler hands out"
                " blocks for all ranks"
            )
        settings = load() if _state is None else _state.settings
        named = settings.device if device is None else str(device)
        if _state is None:
            configure_logging(settings)
            if settings.tiers:
                log_once(
                    logging.WARNING,
                    "KVELASTIC_TIERS does nothing here: blocks of kvcached's interface have no"
                    " keys. Use kvelastic.tiers (docs/tiers.md), or unset it.",
                )
            found = resolve(named, settings)
            reserve_bytes = settings.reserve or 0
            _state = _State(engine, settings, found, reserve_bytes, is_worker, async_sched)
            return
        if _state.engine != engine:
            raise UnsupportedError(
                f"kvelastic is initialized for {_state.engine} in this process already; call"
                " shutdown_kvelastic() first"
            )
        if device is not None and resolve(named, settings).name != _state.device.name:
            raise UnsupportedError(
                f"kvelastic is initialized on {_state.device.name} in this process already, and not"
                f" on {named}; call shutdown_kvelastic() first"
            )
        _state.is_worker = _state.is_worker or is_worker
        _state.async_sched = _state.async_sched or async_sched


def shutdown_kvelastic() -> bool:
    """Release the memory and remove the segments. Does nothing if not initialized.

    Returns True; kvcached 0.1.6 returns False if the call must be repeated.

    Remaining tensors keep their addresses but have no memory: do not access them. Remaining
    managers raise `PoolFailedError` in `alloc`.
    """
    global _state
    with _lock, ExitStack() as closing:  # closes the others too if one raises, as at Ctrl-C
        state, _state = _state, None
        for group in state.groups.values() if state else ():
            closing.callback(group.pool.close, discard=True)
    return True


def use_streams(streams: Sequence[int]) -> None:
    """Set the CUDA streams whose kernels use the caches, as `torch.cuda.Stream.cuda_stream`.

    kvelastic unmaps a page once the work already queued on these streams has finished. 0 is the
    default stream. An empty list means that no kernel uses the caches. The streams replace those
    set before. Without a call, kvelastic uses the default stream and PyTorch's current stream at
    the creation of the first cache. Has no effect on the host. Never blocks. Thread-safe. Raises
    `NotInitializedError`.
    """
    with _lock:
        device = required().device
        driver = None if device.is_host else device.driver()
        if isinstance(driver, _vmm.CudaDriver):
            driver.use_streams(streams)


def reserve(size_bytes: int, device: str | None = None) -> None:
    """Reserve this process's device memory besides KV caches: weights, activations, graphs.

    `size_bytes` replaces the previous reserve; the initial value is `KVELASTIC_RESERVE` or 0. The
    reserve reduces what other instances may hold while the first cache of this process is awake. If
    it grows, other instances are requested to release memory; this blocks for at most five seconds.
    Thread-safe.

    Raises `NotInitializedError`, and `InvalidArgumentError` for an invalid size or a device other
    than that of `init`. Raises `GuaranteeError` or `ReserveError` if the memory is not available;
    these name the holders, and nothing has changed.
    """
    with _lock:
        state = required()
        if isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes < 0:
            raise InvalidArgumentError(
                f"a reserve of {size_bytes!r} is not accepted; give bytes, 0 or more"
            )
        check_device(device, state.device)
        first = next(iter(state.groups.values()), None)
        if first is not None:
            first.pool.reserve(size_bytes)
        state.reserve_bytes = size_bytes


def is_initialized() -> bool:
    """Return whether kvelastic is initialized in this process."""
    return _state is not None


def required() -> _State:
    """Return the state. Raises `NotInitializedError` (a `RuntimeError`) if not initialized."""
    if _state is None:
        raise NotInitializedError("kvelastic is not initialized. Call init_kvelastic() first.")
    return _state


def check_device(device: Any, of_init: Device) -> None:
    """Raise `InvalidArgumentError` if `device` names another kind of device than `of_init`."""
    if means_host(device) not in (None, of_init.is_host):
        raise InvalidArgumentError(
            f"device={device!s} is not the device of init_kvelastic, {of_init.name}"
        )


def alloc_kv_cache(
    kvcache_shape: Sequence[int],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: Any,
    num_layers: int,
    attention_type: str,
    kv_layout: str,
    group_id: int,
    kernel_block_size: int | None = None,
) -> tuple[list[torch.Tensor], ...]:
    """Return the tensors of `tensor_views.CachePlan`, over a range of this process.

    The group's manager maps memory in `alloc`. Raises `NotInitializedError`, the errors of
    `tensor_views.plan`, and `LayoutError` if the group already has another shape.
    """
    from kvelastic.pool.tensors import itemsize_of, view_of, whole_range

    with _lock:
        state = required()
        check_device(device, state.device)
        cache = plan(
            kvcache_shape,
            engine=state.engine,
            block_size=block_size,
            itemsize=itemsize_of(dtype),
            num_layers=num_layers,
            attention_type=attention_type,
            kv_layout=kv_layout,
            page_size_bytes=state.page_size_bytes,
            per_buffer=not state.settings.contiguous_layout,
            kernel_block_size=kernel_block_size,
        )
        group = _group_for(state, group_id, cache.layout, cache.num_blocks, block_size)
        flat = whole_range(group.pool.memory)  # type: ignore[arg-type]  # a local_range
        return tuple(
            [view_of(flat, view, dtype) for view in views] for views in cache.views(group.pages)
        )


@dataclass(frozen=True)
class RawCache:
    """A group's tensors as bytes. In a buffer, block `id` starts at `id * block_bytes`."""

    flat: torch.Tensor
    """The whole range, int8."""
    buffers: list[torch.Tensor]
    """Slices of `flat`, each from a buffer's first byte to the end of the range."""
    ids: int
    """Number of block ids of each buffer."""
    block_bytes: int
    """Bytes of a block in one buffer."""


def raw_cache(group_id: int) -> RawCache:
    """Return the tensors of `alloc_kv_cache` as bytes.

    Raises `NotInitializedError` if the group has no tensors.
    """
    from kvelastic.pool.tensors import whole_range

    with _lock:
        group = required().groups.get(group_id)
        if group is None:
            raise NotInitializedError(
                f"group {group_id} has no tensors; call alloc_kv_cache() first"
            )
        layout = group.layout
        flat = whole_range(group.pool.memory)  # type: ignore[arg-type]  # a local_range
        step_bytes = layout.buffer_stride_bytes(group.pages)
        buffers = [flat[i * step_bytes :] for i in range(layout.buffers)]
        return RawCache(flat, buffers, layout.id_span(group.pages), layout.block_bytes)


def views_of(flat: torch.Tensor, cache: CachePlan, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return other views of existing tensors; `flat` is the whole range of a group.

    Raises `InvalidArgumentError` if `flat` is not a range of kvelastic, and `LayoutError` if the
    plan's blocks do not match the group's buffers.
    """
    from kvelastic.pool.tensors import view_of

    with _lock:
        for group in required().groups.values():
            if flat.data_ptr() == group.pool.memory.address:  # type: ignore[union-attr]
                break
        else:
            raise InvalidArgumentError(
                "raw_kv_tensors are no tensors of kvelastic: give those of alloc_kv_cache(...,"
                " return_meta=True)"
            )
        have, want = group.layout, cache.layout
        if (have.block_bytes, have.buffers) != (want.block_bytes, want.buffers):
            raise LayoutError(
                f"the tensors have {have.buffers} buffers with blocks of {have.block_bytes} bytes,"
                f" and the views want {want.buffers} with blocks of {want.block_bytes}"
            )
        (views,) = replace(cache, layout=have).views(group.pages)
        return [view_of(flat, view, dtype) for view in views]


def alloc_states(
    shapes: Sequence[tuple[Sequence[int], torch.dtype]],
    *,
    num_slots: int,
    num_layers: int,
    device: Any,
    group_id: int,
) -> tuple[list[torch.Tensor], int]:
    """Return tensors `(layers, slots, *shape)` for fixed-size states, and the bytes of a slot.

    A slot is a block of the group. In every layer, it contains the states one after another. Raises
    the same errors as `alloc_kv_cache`.
    """
    from kvelastic.pool.tensors import itemsize_of, view_of, whole_range

    with _lock:
        state = required()
        check_device(device, state.device)
        parts = [(tuple(int(n) for n in shape), itemsize_of(dtype)) for shape, dtype in shapes]
        layout, offsets = plan_states(
            parts,
            num_layers=num_layers,
            page_size_bytes=state.page_size_bytes,
            per_buffer=not state.settings.contiguous_layout,
        )
        group = _group_for(state, group_id, layout, num_slots, 1)
        flat = whole_range(group.pool.memory)  # type: ignore[arg-type]  # a local_range
        tensors = [
            view_of(flat, state_view(layout, group.pages, offset_bytes, shape, itemsize), dtype)
            for offset_bytes, (shape, itemsize), (_, dtype) in zip(
                offsets, parts, shapes, strict=True
            )
        ]
        return tensors, layout.block_bytes


def runtime_snapshot(engine: str) -> RuntimeSnapshot:
    """Return the state of this process, even if it is not initialized."""
    with _lock:
        state = _state if _state is not None and _state.engine == engine else None
        return RuntimeSnapshot(
            schema_version=SCHEMA_VERSION,
            engine=engine,
            initialized=state is not None,
            device=None if state is None else state.device.name,
            world_size=1,
            pp_rank=0,
            async_sched=state is not None and state.async_sched,
            contiguous_layout=Config.contiguous_layout
            if state is None
            else state.settings.contiguous_layout,
            is_worker=state is not None and state.is_worker,
        )


def pool_snapshots(engine: str) -> list[KVCachePoolSnapshot]:
    """Return a snapshot of every group with a manager."""
    with _lock:
        if _state is None or _state.engine != engine:
            return []
        managers = [group.manager for group in _state.groups.values() if group.manager is not None]
    return [manager.observability_snapshot(integration=engine) for manager in managers]


def get_kv_cache_manager(
    num_blocks: int,
    block_size: int,
    cell_size: int,
    num_layers: int,
    num_kv_buffers: int = 2,
    group_id: int = 0,
) -> KVCacheManager:
    """Return the manager of a group's blocks; later calls return the same one.

    `block_size` is in tokens. `cell_size` is the bytes of one token in one buffer (heads * dim *
    itemsize). `num_kv_buffers` is 2 for K and V, 1 for MLA. The tensors may be created before or
    after the manager. Block 0 is never allocated, because engines use it as padding. Raises
    `RuntimeError` before init, and `LayoutError` if the arguments do not match the tensors' blocks.
    """
    with _lock:
        state = required()
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or value < 1:
                raise LayoutError(f"{name}={value!r} is not accepted; it must be 1 or more")
        group = state.groups.get(group_id)
        if group is None:
            layout = PageLayout.solve(
                block_size * cell_size,
                num_layers * num_kv_buffers,
                page_size_bytes=state.page_size_bytes,
                per_buffer=not state.settings.contiguous_layout,
            )
            group = _group_for(state, group_id, layout, num_blocks, block_size)
        have_bytes = group.layout.block_bytes * group.layout.buffers
        want_bytes = block_size * cell_size * num_layers * num_kv_buffers
        if have_bytes != want_bytes:
            raise LayoutError(
                f"a manager of block_size={block_size}, cell_size={cell_size},"
                f" num_layers={num_layers} and num_kv_buffers={num_kv_buffers} has blocks of"
                f" {want_bytes} bytes, the tensors of group {group_id} have blocks of"
                f" {have_bytes}; give both the same shape"
            )
        if num_blocks > group.num_blocks:
            raise LayoutError(
                f"num_blocks={num_blocks} is more than the {group.num_blocks} blocks of the"
                f" tensors of group {group_id}"
            )
        if group.manager is None:
            group.manager = KVCacheManager(
                group.pool,
                num_blocks=num_blocks,
                block_size=block_size,
                num_layers=num_layers,
                num_kv_buffers=num_kv_buffers,
                group_id=group_id,
            )
        return group.manager


def _group_for(
    state: _State, group_id: int, layout: PageLayout, num_blocks: int, block_tokens: int
) -> _Group:
    group = state.groups.get(group_id)
    if group is not None:
        if (group.layout, group.num_blocks) != (layout, num_blocks):
            raise LayoutError(
                f"group {group_id} has {group.num_blocks} blocks of {group.layout} already, which"
                f" does not go with {num_blocks} blocks of {layout}; use another group_id, or call"
                " alloc_kv_cache before get_kv_cache_manager"
            )
        return group
    if not state.device.is_host:
        from kvelastic.pool.tensors import name_streams

        name_streams(state.device.driver())
    pages = layout.pages_for_blocks(max(num_blocks, 2))
    name = state.settings.ipc_name
    pool = open_pool(
        state.settings,
        layout,
        pages,
        num_blocks=max(num_blocks, 2),
        block_tokens=block_tokens,
        engine=engines.find(state.engine).title,
        devices=[state.device],
        memory=local_range(state.device, guard_pages=state.settings.guard_pages),
        reserve_bytes=0 if state.groups else state.reserve_bytes,
        name=f"{name}_g{group_id}" if name and group_id else None,
    )
    pool.start_maintenance()
    return state.groups.setdefault(group_id, _Group(pool, layout, pages, num_blocks))
