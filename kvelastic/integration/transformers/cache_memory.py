"""The memory of one of transformers' paged caches: segment, pool, and tensors over its range.

transformers first decides how many blocks there are, and then allocates them. `Making` answers
both: as many as its range has ids, and addresses in that range, with no memory behind them yet::

    with SectorMaking(settings, torch_device, model) as making:
        ...                                  # PagedAttentionCache.__init__, on this thread
    memory = making.finish()

`SectorMaking` does so for one flat tensor (5.18 and later), `block_memory` for one a layer (5.17).

Imports torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from kvelastic import _vmm, gpu_table, page_size, tensors
from kvelastic.config import Config
from kvelastic.device import AUTO, Device, resolve
from kvelastic.errors import ConfigError, EngineError
from kvelastic.layout import PageLayout
from kvelastic.pool import ElasticPool, local_range, open_pool
from kvelastic.process_memory import anonymous_bytes
from kvelastic.sizes import format_size

_log = logging.getLogger("kvelastic.transformers")

_own_names: set[str] = set()
"""Instances of this process: a second cache needs a name of its own where one is set."""

TRASH_BLOCKS: Final = 2
"""transformers allocates so many (sectors, in 5.18 and later) besides those that it was told of."""


@dataclass(frozen=True)
class CacheMemory:
    """A cache's elastic memory, as long as the cache lives."""

    pool: ElasticPool
    layout: PageLayout
    device: Device
    capacity_blocks: int
    """Blocks of the pool that the cache was configured with: what there can be at most."""

    def close(self) -> None:
        """Give everything back; blocks in use stay as long as a tensor shows them. Repeatable."""
        _own_names.discard(self.pool.name)
        self.pool.close()


class Making(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
    """Answers for one cache that is being made; not thread-safe, used once."""

    expected = 1
    """Allocations by which transformers makes its cache."""

    def __init__(self, settings: Config, torch_device: torch.device, model: str) -> None:
        super().__init__()
        self._settings = settings
        self._torch_device = torch_device
        self._model = model
        self._answered = 0
        self.memory: CacheMemory | None = None

    def _open(
        self, make_layout: Callable[[int], PageLayout], block_tokens: int, wanted: int | None
    ) -> tuple[int, torch.Tensor]:
        """Make the pool; how many ids there are, and the whole range.

        `make_layout` is given the page size to start from. `wanted` None: as many blocks as the
        device has room for. Maps nothing yet. Raises what `open_pool` raises, `ConfigError` for a
        device that does not fit, `LayoutError` for a block that fits no page.
        """
        settings = self._settings
        device = _device(settings, self._torch_device)
        layout = make_layout(page_size.of(settings, [device]))
        capacity_pages = max(device.capacity_bytes // layout.page_bytes, 1)
        pages = capacity_pages
        if wanted is not None:
            pages = layout.pages_for_blocks(wanted + 1)
            if pages > capacity_pages:
                _log.warning(
                    "transformers wants %s of KV cache, and %s has room for %d pages of %s."
                    " Requests that need more than that will wait until they are cancelled.",
                    format_size(pages * layout.page_bytes),
                    "KVELASTIC_HOST_MEMORY" if device.is_host else device.name,
                    capacity_pages,
                    format_size(layout.page_bytes),
                )
                pages = capacity_pages
        # transformers needs one besides its trash.
        pages = max(pages, layout.pages_for_blocks(TRASH_BLOCKS + 1))
        blocks = pages * layout.blocks_per_page - 1
        if wanted is not None:
            blocks = min(blocks, wanted)
        pool = open_pool(
            settings,
            layout,
            pages,
            num_blocks=blocks + 1,
            block_tokens=block_tokens,
            engine="transformers",
            model=self._model,
            devices=[device],
            memory=local_range(device, guard_pages=settings.guard_pages),
            name=_name(settings),
            movable=True,
        )
        _own_names.add(pool.name)
        self.memory = CacheMemory(pool, layout, device, blocks)
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
        assert isinstance(pool.memory, _vmm.Range)
        return layout.id_span(pages), tensors.whole_range(pool.memory)

    def finish(self) -> CacheMemory:
        """The memory, once the cache is made. Raises `EngineError` if it lies elsewhere."""
        if self.memory is None or self._answered != self.expected:
            raise EngineError(
                f"transformers allocated its cache in {self._answered} tensors instead of"
                f" {self.expected}, in a way that kvelastic does not know. Please report this with"
                " the model's name; unset ENABLE_KVELASTIC to go on without kvelastic."
            )
        return self.memory

    def close(self) -> None:
        """The cache was not made after all: leave nothing behind."""
        if self.memory is not None:
            self.memory.close()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every function on this thread while the cache is being made."""
        found = self._answer(func, args, kwargs or {})
        if found is None:
            return func(*args, **(kwargs or {}))
        self._answered += 1
        return found

    def _answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """What transformers gets for that call, where it allocates the cache."""
        raise NotImplementedError


class SectorMaking(Making):
    """For one tensor of bytes, in which all layers of a block lie side by side."""

    _tensor: torch.Tensor | None = None

    def size(self, sector_bytes: int, sector_tokens: int, wanted_sectors: int | None) -> int:
        """Make the pool (see `_open`); returns the sectors that transformers is to believe in."""

        def make_layout(page_size_bytes: int) -> PageLayout:
            # To the layout they are one buffer, and need no neighbours.
            return PageLayout.solve(
                sector_bytes, 1, page_size_bytes=page_size_bytes, fewest_blocks=1
            )

        span, whole_range = self._open(make_layout, sector_tokens, wanted_sectors)
        self._tensor = whole_range.view(torch.uint8)[: span * sector_bytes]
        return span - TRASH_BLOCKS

    def _answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        if (
            func is torch.zeros
            and self._tensor is not None
            and args == (self._tensor.numel(),)
            and kwargs.get("dtype") is torch.uint8
        ):
            return self._tensor
        return None


def begin(memory: CacheMemory, settings: Config, torch_device: torch.device) -> None:
    """Say what this process holds besides, map the trash sector, and answer requests from here on.

    Raises `GuaranteeError` and `ReserveError` if the device has no room for the reserve.
    """
    pool = memory.pool
    reserve_bytes = settings.reserve
    if len(_own_names) > 1:
        reserve_bytes = 0  # weights are the process's, and an earlier cache of it has said them
    elif reserve_bytes is None:
        reserve_bytes = held_besides_bytes(torch_device)
    pool.reserve(reserve_bytes)
    pool.blocks.ensure(1)
    pool.start_keeper()
    _log.info(
        "%s of %s besides the KV cache are reserved.",
        format_size(reserve_bytes),
        memory.device.name,
    )
    _log.info("Ready as %s: kvctl list shows it, kvctl limit changes its limit.", pool.name)


def held_besides_bytes(torch_device: torch.device) -> int:
    """What this process holds of the device besides KV cache: weights, above all."""
    if torch_device.type == "cpu":
        return anonymous_bytes(os.getpid())
    return int(torch.cuda.memory_reserved(torch_device))


def _name(settings: Config) -> str | None:
    """The name that is set, with a number for the second cache of this process; None: made up."""
    if settings.ipc_name is None or settings.ipc_name not in _own_names:
        return settings.ipc_name
    numbered = (f"{settings.ipc_name}_{number}" for number in count(2))
    return next(name for name in numbered if name not in _own_names)


def _device(settings: Config, torch_device: torch.device) -> Device:
    on_gpu = torch_device.type != "cpu"
    if settings.device != AUTO and settings.device.startswith("cuda") != on_gpu:
        raise ConfigError(
            f"KVELASTIC_DEVICE={settings.device!r} does not fit a model on {torch_device}: set it"
            " to auto, or leave it unset."
        )
    if not on_gpu:
        return resolve("cpu", settings)
    device = resolve(f"cuda:{torch_device.index or 0}", settings)
    model = str(torch.cuda.get_device_name(torch_device))
    _log.info(
        "The KV cache is on %s (%s).%s",
        device.name,
        model,
        ""
        if gpu_table.has_run(model)
        else " No GPU of this model is in the table of docs/gpu.md yet: please report how it went.",
    )
    return device
