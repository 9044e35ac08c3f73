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

import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from kvelastic import _vmm, engine_pool, places, tensors
from kvelastic.config import Config
from kvelastic.engine_pool import EnginePool
from kvelastic.errors import EngineError
from kvelastic.layout import PageLayout
from kvelastic.process_memory import anonymous_bytes

TRASH_BLOCKS: Final = 2
"""transformers allocates so many (sectors, in 5.18 and later) besides those that it was told of."""


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
        self.memory: EnginePool | None = None

    def _open(
        self, make_layout: Callable[[int], PageLayout], block_tokens: int, wanted: int | None
    ) -> tuple[int, torch.Tensor]:
        """Make the pool; how many ids there are, and the whole range.

        `make_layout` is given the page size to start from. `wanted` None: as many blocks as the
        device has room for. Maps nothing yet. Raises what `open_pool` raises, `ConfigError` for a
        device that does not fit, `LayoutError` for a block that fits no page.
        """
        settings = self._settings
        on_gpu = self._torch_device.type != "cpu"
        device = engine_pool.device_for(
            settings,
            "transformers",
            gpu=(self._torch_device.index or 0) if on_gpu else None,
            gpu_model=torch.cuda.get_device_name(self._torch_device) if on_gpu else "",
        )
        layout = make_layout(places.page_size_bytes(settings, [device]))
        self.memory = engine_pool.open_engine_pool(
            settings,
            device,
            layout,
            block_tokens=block_tokens,
            wanted_blocks=wanted,
            engine="transformers",
            model=self._model,
            least_blocks=TRASH_BLOCKS,  # it needs one besides its trash
            movable=True,
        )
        pool = self.memory.pool
        assert isinstance(pool.memory, _vmm.Range)
        return layout.id_span(self.memory.pages), tensors.whole_range(pool.memory)

    def finish(self) -> EnginePool:
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


def held_besides_bytes(torch_device: torch.device) -> int:
    """What this process holds of the device besides KV cache: weights, above all."""
    if torch_device.type == "cpu":
        return anonymous_bytes(os.getpid())
    return held_of_gpu_bytes(torch_device)


def held_of_gpu_bytes(torch_device: torch.device) -> int:
    """What PyTorch holds of a GPU, in use or kept for its next tensors: of a step, its peak.

    Not the peak of the process, which may be that of loading the weights.
    """
    statistics = torch.cuda.memory_stats_as_nested_dict(torch_device)
    return int(statistics["reserved_bytes"]["all"]["current"]) if statistics else 0
