"""The pool of an engine that schedules and computes in one process: transformers, SGLang.

    device = device_for(settings, "SGLang", gpu=None)
    cache = open_engine_pool(settings, device, layout, block_tokens=32, wanted_blocks=4096,
                             engine="SGLang", model=name)
    ...                                  # the engine makes its tensors over `cache.pool.memory`
    cache.begin(settings, held_besides)  # once it has loaded and is about to serve
    cache.close()

vLLM's scheduler and workers are separate processes that use a ring: see `integration/vllm`. Imports
neither torch nor an engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import count

from kvelastic.config import Config
from kvelastic.device import tested_gpus
from kvelastic.device.selection import AUTO, Device, resolve
from kvelastic.errors import ConfigError
from kvelastic.logs import log_once
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import ElasticPool, local_range, open_pool
from kvelastic.pool.scheduling.blocks import SchedulerBlocks
from kvelastic.pool.step_reserve import StepReserve
from kvelastic.shared.segment_listing import kvcached_name
from kvelastic.units import format_size

_log = logging.getLogger("kvelastic")

_own_names: set[str] = set()
"""Names of this process's instances. If a name is configured, later caches get a suffix."""
_reserving: dict[str, str] = {}
"""By device, the name of the open instance that reserves this process's weights there. After its
close, the next new instance on the device does."""


@dataclass(frozen=True)
class EnginePool:
    """The elastic memory of a cache."""

    pool: ElasticPool
    layout: PageLayout
    device: Device
    capacity_blocks: int
    """Maximum number of blocks, without the null block."""
    blocks: SchedulerBlocks
    """The blocks that the engine's scheduler allocates and frees."""
    step_reserve: StepReserve | None = None
    """Adjusts the reserve to the engine's steps. None on the host, where the maintenance thread
    monitors memory, and if the reserve is configured or belongs to another cache of this process
    on the device."""

    @property
    def pages(self) -> int:
        """Number of pages of its address range."""
        return self.pool.blocks.geometry.pages

    def begin(self, settings: Config, held_besides_bytes: int) -> None:
        """Reserve memory, map the null block and start handling requests.

        `held_besides_bytes` is this process's device memory besides KV cache, mainly weights; on a
        GPU, room for a step is added. `KVELASTIC_RESERVE` overrides both. Raises `GuaranteeError`,
        `ReserveError` or `OutOfMemoryError` if the device has no room.
        """
        reserve_bytes = settings.reserve
        if self.pool.name != _reserving.get(self.device.name):
            reserve_bytes = 0  # another cache of this process has reserved its weights there
        elif reserve_bytes is None:
            reserve_bytes = held_besides_bytes
        if self.step_reserve is not None:
            reserve_bytes = self.step_reserve.begin(held_besides_bytes)
        else:
            self.pool.reserve(reserve_bytes)
        self.pool.map_null_block()
        self.pool.start_maintenance()
        _log.info(
            "%s of %s besides the KV cache are reserved.",
            format_size(reserve_bytes),
            self.device.name,
        )
        _log.info(
            "Ready as %s: kvctl list shows it, kvctl limit changes its limit.", self.pool.name
        )

    def close(self) -> None:
        """Release everything, except blocks in use by a tensor. Idempotent."""
        _own_names.discard(kvcached_name(self.pool.name))
        if self.pool.name == _reserving.get(self.device.name):
            del _reserving[self.device.name]
        self.pool.close()


def open_engine_pool(
    settings: Config,
    device: Device,
    layout: PageLayout,
    *,
    block_tokens: int,
    wanted_blocks: int | None,
    engine: str,
    model: str,
    least_blocks: int = 1,
    movable: bool = False,
    has_tiers: bool = False,
) -> EnginePool:
    """Create the pool. Maps no page.

    `wanted_blocks` is the engine's configured number of blocks, without the null block. None: as
    many as the device has room for. There are at least `least_blocks`. `engine` is its name for
    people. `open_pool` documents `movable` and the exceptions. Without `has_tiers`, a set
    KVELASTIC_TIERS is reported once in the log as having no effect.
    """
    if settings.tiers and not has_tiers:
        log_once(
            logging.WARNING,
            f"KVELASTIC_TIERS does nothing under {engine} yet: evicted blocks are computed again."
            " Unset it to remove this line.",
        )
    capacity_pages = max(device.capacity_bytes // layout.page_bytes, 1)
    pages = capacity_pages
    if wanted_blocks is not None:
        pages = layout.pages_for_blocks(wanted_blocks + 1)
        if pages > capacity_pages:
            _log.info(
                "%s requests %s of KV cache and gets at most %s, the capacity of %s.",
                engine,
                format_size(pages * layout.page_bytes),
                format_size(capacity_pages * layout.page_bytes),
                "KVELASTIC_HOST_MEMORY" if device.is_host else device.name,
            )
            pages = capacity_pages
    pages = max(pages, layout.pages_for_blocks(least_blocks + 1))
    blocks = pages * layout.blocks_per_page - 1
    if wanted_blocks is not None:
        blocks = min(blocks, wanted_blocks)
    pool = open_pool(
        settings,
        layout,
        pages,
        num_blocks=blocks + 1,
        block_tokens=block_tokens,
        engine=engine,
        model=model,
        devices=[device],
        memory=local_range(device, guard_pages=settings.guard_pages),
        name=_name(settings),
        movable=movable,
    )
    step_reserve = None
    if device.name not in _reserving:
        _reserving[device.name] = pool.name
        if not (device.is_host or settings.reserve is not None):
            step_reserve = StepReserve(pool.reserve, device.capacity_bytes)
    _own_names.add(kvcached_name(pool.name))
    _log.info(
        "KV cache of %d blocks of %d tokens, in at most %d pages of %s with %d blocks each"
        " (%.1f%% padding).",
        blocks,
        block_tokens,
        pages,
        format_size(layout.page_bytes),
        layout.blocks_per_page,
        100 * layout.padding_fraction,
    )
    blocks_of_scheduler = SchedulerBlocks(pool.blocks)
    return EnginePool(pool, layout, device, blocks, blocks_of_scheduler, step_reserve)


def device_for(settings: Config, engine: str, *, gpu: int | None, gpu_model: str = "") -> Device:
    """Return the device of the engine's model: the host, or this process's GPU number `gpu`.

    Raises `ConfigError` if KVELASTIC_DEVICE names another kind of device, and the errors of
    `device.selection.resolve`.
    """
    on_gpu = gpu is not None
    if settings.device != AUTO and settings.device.startswith("cuda") != on_gpu:
        where = f"cuda:{gpu}" if on_gpu else "cpu"
        raise ConfigError(
            f"KVELASTIC_DEVICE={settings.device!r} does not fit a model of {engine} on {where}: set"
            " it to auto, or leave it unset."
        )
    if not on_gpu:
        return resolve("cpu", settings)
    device = resolve(f"cuda:{gpu}", settings)
    _log.info(
        "The KV cache is on %s (%s). %s",
        device.name,
        gpu_model,
        tested_gpus.experience(gpu_model),
    )
    return device


def _name(settings: Config) -> str | None:
    """Return the configured name, with a suffix for later caches; None for an automatic name."""
    if settings.ipc_name is None or settings.ipc_name not in _own_names:
        return settings.ipc_name
    numbered = (f"{settings.ipc_name}_{number}" for number in count(2))
    return next(name for name in numbered if name not in _own_names)
