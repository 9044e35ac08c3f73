"""The memory of one of transformers' paged caches: segment, pool, and tensors over its range.

transformers first computes the number of blocks, and then allocates them. `Making` serves both. The
number is that of ids in its range, and the allocation returns addresses without memory yet::

    with SectorMaking(settings, torch_device, model) as making:
        ...                                  # PagedAttentionCache.__init__, on this thread
    memory = making.finish()

`SectorMaking` is for one flat tensor (5.18 and later), `block_memory` for tensors per layer (5.17).

Imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.device.process_memory import anonymous_bytes
from kvelastic.errors import EngineError
from kvelastic.pool import engine_pool, tensors
from kvelastic.pool.engine_pool import EnginePool
from kvelastic.pool.layout import PageLayout
from kvelastic.shared import device_set

TRASH_BLOCKS: Final = 2
"""Blocks (5.18 and later: sectors) that transformers allocates beyond the number it was given."""


class Making(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
    """Serves the allocations of one cache under construction. Not thread-safe; used once."""

    expected = 1
    """Number of allocations with which transformers makes its cache."""

    def __init__(self, settings: Config, torch_device: torch.device, model: str) -> None:
        super().__init__()
        self._settings = settings
        self._torch_device = torch_device
        self._model = model
        self._answered = 0
        self.memory: EnginePool | None = None

    def _open(
        self, make_layout: Callable[[int], PageLayout], block_tokens: int, wanted: int | None
    ) -> tuple[int, torch.Tensor]:
        """Make the pool; return the number of ids, and the whole range as a tensor.

        `make_layout` returns the layout for an initial page size. If `wanted` is None, there are as
        many blocks as fit on the device. Maps nothing yet. Raises the errors of `open_pool`,
        `ConfigError` for a wrong device, and `LayoutError` if a block fits no page.
        """
        settings = self._settings
        on_gpu = self._torch_device.type != "cpu"
        device = engine_pool.device_for(
            settings,
            "transformers",
            gpu=(self._torch_device.index or 0) if on_gpu else None,
            gpu_model=torch.cuda.get_device_name(self._torch_device) if on_gpu else "",
        )
        layout = make_layout(device_set.page_size_bytes(settings, [device]))
        self.memory = engine_pool.open_engine_pool(
            settings,
            device,
            layout,
            block_tokens=block_tokens,
            wanted_blocks=wanted,
            engine="transformers",
            model=self._model,
            least_blocks=TRASH_BLOCKS,  # transformers needs one besides its trash
            movable=True,
        )
        pool = self.memory.pool
        assert isinstance(pool.memory, _vmm.Range)
        return layout.id_span(self.memory.pages), tensors.whole_range(pool.memory)

    def finish(self) -> EnginePool:
        """Return the memory after the cache is made.

        Raises `EngineError` if transformers allocated its cache in another way.
        """
        if self.memory is None or self._answered != self.expected:
            raise EngineError(
                f"transformers allocated its cache in {self._answered} tensors instead of"
                f" {self.expected}, in a way that kvelastic does not know. Please report this with"
                " the model's name; unset ENABLE_KVELASTIC to go on without kvelastic."
            )
        return self.memory

    def close(self) -> None:
        """Release everything after the cache could not be made."""
        if self.memory is not None:
            self.memory.close()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Intercept torch functions on this thread while the cache is under construction."""
        found = self._answer(func, args, kwargs or {})
        if found is None:
            return func(*args, **(kwargs or {}))
        self._answered += 1
        return found

    def _answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return the tensor for a call that allocates the cache; None for any other call."""
        raise NotImplementedError


class SectorMaking(Making):
    """Serves the allocation of one tensor of bytes, in which a block has all its layers."""

    _tensor: torch.Tensor | None = None

    def size(self, sector_bytes: int, sector_tokens: int, wanted_sectors: int | None) -> int:
        """Make the pool (see `_open`); return the number of sectors to report to transformers."""

        def make_layout(page_size_bytes: int) -> PageLayout:
            # The layout sees one buffer, and sectors need not be contiguous.
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


def held_besides_bytes(torch_device: torch.device) -> int:
    """Return the device memory of this process besides KV cache, mainly weights."""
    if torch_device.type == "cpu":
        return anonymous_bytes(os.getpid())
    return held_of_gpu_bytes(torch_device)


def held_of_gpu_bytes(torch_device: torch.device) -> int:
    """Return the GPU memory that PyTorch has reserved, used or cached: the peak of a step.

    It is not the peak of the process, which may have been the loading of weights.
    """
    statistics = torch.cuda.memory_stats_as_nested_dict(torch_device)
    return int(statistics["reserved_bytes"]["all"]["current"]) if statistics else 0
