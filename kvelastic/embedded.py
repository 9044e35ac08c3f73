"""kvelastic inside one process: the state behind kvcached's functions.

    init("vllm", device="cpu", ...); tensors = alloc_kv_cache(...)
    manager = get_kv_cache_manager(...); shutdown_kvelastic()

A *group* is one cache shape with its tensors and manager; group 0 is the only one most models have.
Each group is an instance of its own: a segment, a limit, a line in `kvctl list`. The functions may
be called from any thread, one at a time.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvelastic import _vmm, engines, places
from kvelastic.config import Config, configure_logging, load
from kvelastic.device import Device, means_host, resolve
from kvelastic.errors import (
    InvalidArgumentError,
    LayoutError,
    NotInitializedError,
    UnsupportedError,
)
from kvelastic.layout import PageLayout
from kvelastic.logs import say_once
from kvelastic.manager import KVCacheManager
from kvelastic.pool import ElasticPool, local_range, open_pool
from kvelastic.snapshots import SCHEMA_VERSION, KVCachePoolSnapshot, RuntimeSnapshot
from kvelastic.views import CachePlan, plan, plan_states, state_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass
class _Group:
    """One cache: its pool, and what it was made for."""

    pool: ElasticPool
    layout: PageLayout
    pages: int
    num_blocks: int
    manager: KVCacheManager | None = None


@dataclass
class _State:
    """What `init` was told; exists from init to shutdown."""

    engine: str
    """Its name in `kvelastic.engines`."""
    settings: Config
    device: Device
    reserve_bytes: int = 0
    """What this process holds of the device besides its caches; its first group says so."""
    is_worker: bool = False
    async_sched: bool = False
    """The last two change nothing, and are shown in snapshots."""
    groups: dict[int, _Group] = field(default_factory=dict)

    @property
    def page_size_bytes(self) -> int:
        """What layouts start from."""
        return places.page_size_bytes(self.settings, [self.device])


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
    """Make this process ready; a second call with the same arguments changes nothing.

    Raises `UnsupportedError` for more than one rank, and in a second call for another engine or
    another device; `DeviceUnavailableError` for a GPU that cannot be had, and `ConfigError` for a
    variable with a bad value.
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
                say_once(
                    logging.WARNING,
                    "KVELASTIC_TIERS does nothing here: blocks of kvcached's interface have no"
                    " keys. Use kvelastic.tiers (docs/tiers.md), or unset it.",
                )
            place = resolve(named, settings)
            reserve_bytes = settings.reserve or 0
            _state = _State(engine, settings, place, reserve_bytes, is_worker, async_sched)
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


def shutdown_kvelastic() -> None:
    """Give all memory back and remove the segments; nothing happens if not initialized.

    Tensors that live on keep their addresses, with no memory behind them: they must not be touched
    any more. Managers that live on hand out no block: their `alloc` raises `PoolFailedError`.
    """
    global _state
    with _lock:
        state, _state = _state, None
        for group in state.groups.values() if state else ():
            group.pool.close(discard=True)


def use_streams(streams: Sequence[int]) -> None:
    """Name the CUDA streams whose kernels use the caches, as `torch.cuda.Stream.cuda_stream`.

    Pages are unmapped when the work in them is done that was queued before. 0 is the default
    stream; no stream at all says that no kernel uses the caches. They take the place of those named
    before; without a call they are the default stream and the one that was PyTorch's current stream
    when the first cache was made. Nothing to do on the host. Never blocks; any thread. Raises
    `NotInitializedError`.
    """
    with _lock:
        device = required().device
        driver = None if device.is_host else device.driver()
        if isinstance(driver, _vmm.CudaDriver):
            driver.use_streams(streams)


def reserve(size_bytes: int, device: str | None = None) -> None:
    """Say what this process holds of its device besides KV caches: weights, activations, graphs.

    The whole of it, each time; `KVELASTIC_RESERVE`, or 0, before the first call. It counts against
    what other instances may hold while the first cache of this process is awake. For more than
    before, others are asked; blocks for five seconds at most until they have given it. Any thread.
    Raises `NotInitializedError`, `InvalidArgumentError` for a bad size or another device
    than that of `init`, `GuaranteeError` and `ReserveError`, which say who holds what, with nothing
    changed.
    """
    with _lock:
        state = required()
        if isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes < 0:
            raise InvalidArgumentError(
                f"a reserve of {size_bytes!r} is not accepted; give bytes, 0 or more"
            )
        if means_host(device) not in (None, state.device.is_host):
            raise InvalidArgumentError(
                f"device={device!s} is not the device of init_kvelastic, {state.device.name}"
            )
        first = next(iter(state.groups.values()), None)
        if first is not None:
            first.pool.reserve(size_bytes)
        state.reserve_bytes = size_bytes


def is_initialized() -> bool:
    """Whether `init` was called and `shutdown` was not."""
    return _state is not None


def required() -> _State:
    """The state. Raises `NotInitializedError` (a `RuntimeError`) without one."""
    if _state is None:
        raise NotInitializedError("kvelastic is not initialized. Call init_kvelastic() first.")
    return _state


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
    """The tensors of `views.CachePlan`, over a range of this process.

    Memory comes with `alloc` of the group's manager. Raises `NotInitializedError`, and the errors
    of `views.plan`; `LayoutError` if the group has another shape already.
    """
    from kvelastic.tensors import itemsize_of, view_of, whole_range

    with _lock:
        state = required()
        if means_host(device) not in (None, state.device.is_host):
            raise InvalidArgumentError(
                f"device={device!s} is not the device of init_kvelastic, {state.device.name}"
            )
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
    """A group's tensors as bytes; block id of a buffer begins at `id * block_bytes` of it."""

    flat: torch.Tensor
    """The whole range, int8."""
    buffers: list[torch.Tensor]
    """The same from each buffer's first byte on."""
    ids: int
    """Block ids that each buffer has."""
    block_bytes: int
    """Of a block in one buffer."""


def raw_cache(group_id: int) -> RawCache:
    """The tensors of `alloc_kv_cache` as bytes. Raises `NotInitializedError` without any."""
    from kvelastic.tensors import whole_range

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
    """Other views of tensors that are there: `flat` is the whole range of a group.

    Raises `LayoutError` where the plan's blocks are not those of the group's buffers.
    """
    from kvelastic.tensors import view_of

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
    """Tensors `(layers, slots, *shape)` for states of a fixed size, and the bytes of a slot.

    A slot is a block of the group: its states lie one after the other, in every layer. Raises as
    `alloc_kv_cache`.
    """
    from kvelastic.tensors import itemsize_of, view_of, whole_range

    with _lock:
        state = required()
        if means_host(device) not in (None, state.device.is_host):
            raise InvalidArgumentError(
                f"device={device!s} is not the device of init_kvelastic, {state.device.name}"
            )
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
    """What this process is; also where it is not initialized."""
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
    """Of every group that has a manager."""
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
    """The manager of the cache's blocks; one a group, however often it is asked for.

    `block_size` is the tokens of a block, `cell_size` the bytes of one token in one buffer
    (heads * dim * itemsize), `num_kv_buffers` 2 for K and V, 1 for MLA. The tensors may be made
    before or after it. Block 0 is never handed out: engines use it as padding. Raises
    `RuntimeError` before init, `LayoutError` if the arguments do not describe the tensors' blocks.
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
        from kvelastic.tensors import name_streams

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
    pool.start_keeper()
    return state.groups.setdefault(group_id, _Group(pool, layout, pages, num_blocks))
