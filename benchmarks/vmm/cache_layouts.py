"""Tensors for the same KV in the layouts that are compared: paged, per block, per layer, dense.

    cache = paged(LLAMA_3_8B, driver, blocks=4096, page_bytes=16 << 20)
    keys, values = cache.layers[3]          # (ids, tokens, heads, dim), all ids of the range
    keys[cache.ids[7]]                      # the eighth block of the cache

With `range_bytes` the pages in use lie evenly over a range of so many bytes, the first and the last
page among them, and blocks take the highest ids that these have.

paged      one page has a few blocks of all layers, sorted by layer      (kvelastic's)
per block  all layers of a block side by side, one page of 2 MiB x buffers (kvcached's contiguous)
per layer  each buffer has pages of its own                              (2 MiB)
dense      a plain tensor a layer from torch's allocator; no range at all
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.vmm import kvcached_calls, own_pages
from benchmarks.vmm.models import BF16_BYTES, MIB, Model
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.tensor_views import TensorView, block_view

if TYPE_CHECKING:
    import torch

    from kvelastic import _vmm


@dataclass(frozen=True)
class Cache:
    """Keys and values of each layer, and the ids that its blocks have there."""

    name: str
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    ids: torch.Tensor
    """int64 on the cache's device: block i of the cache is at id ids[i]."""

    def fill_as(self, other: Cache) -> None:
        """The same contents, block by block; ids that have no block are left alone."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for target, source in zip(mine, theirs, strict=True):
                target[self.ids] = source[other.ids]


def dense(model: Model, blocks: int, device: str, dtype: torch.dtype | None = None) -> Cache:
    """Random contents: what the other caches are filled with and compared to.

    `dtype` has two bytes and is bfloat16 unless said.
    """
    import torch

    def buffer() -> torch.Tensor:
        shape = (blocks, *model.block_shape)
        made = torch.empty(shape, dtype=dtype or torch.bfloat16, device=device)
        return made.normal_()

    layers = [(buffer(), buffer()) for _ in range(model.layers)]
    return Cache("dense", layers, torch.arange(blocks, device=device))


def paged(
    model: Model,
    driver: _vmm.Driver,
    blocks: int,
    page_bytes: int,
    *,
    range_bytes: int = 0,
    dtype: torch.dtype | None = None,
) -> Cache:
    per_page = page_bytes // model.block_all_bytes
    layout = PageLayout(model.block_bytes, model.buffers, per_page, page_bytes)
    return _over_range(paged_name(page_bytes), model, driver, layout, blocks, range_bytes, dtype)


def paged_name(page_bytes: int) -> str:
    """What the cache of `paged` is called."""
    return f"paged, {page_bytes // MIB} MiB"


def per_layer(
    model: Model,
    driver: _vmm.Driver,
    blocks: int,
    *,
    range_bytes: int = 0,
    dtype: torch.dtype | None = None,
) -> Cache:
    layout = PageLayout.solve(model.block_bytes, model.buffers, per_buffer=True)
    return _over_range("per layer", model, driver, layout, blocks, range_bytes, dtype)


def per_block(
    model: Model,
    driver: _vmm.Driver,
    blocks: int,
    *,
    range_bytes: int = 0,
    dtype: torch.dtype | None = None,
) -> Cache:
    """A block is `buffers` pieces side by side: the next block of a layer is all of them away."""
    page_bytes = kvcached_calls.contiguous(model).page_id_bytes
    per_page = page_bytes // model.block_all_bytes
    layout = PageLayout(model.block_bytes, model.buffers, per_page, page_bytes)
    flat, pages, mapped = _mapped(driver, layout, blocks, range_bytes)
    tokens, heads, dim = model.block_shape
    views = [
        TensorView(
            offset_bytes=buffer * model.block_bytes,
            shape=(pages * per_page, tokens, heads, dim),
            strides=(model.block_all_bytes // BF16_BYTES, heads * dim, dim, 1),
            itemsize=BF16_BYTES,
        )
        for buffer in range(model.buffers)
    ]
    ids = [page * per_page + i for page in mapped for i in range(per_page)]
    return _cache("per block", flat, views, ids[len(ids) - blocks :], dtype)


def _over_range(
    name: str,
    model: Model,
    driver: _vmm.Driver,
    layout: PageLayout,
    blocks: int,
    range_bytes: int,
    dtype: torch.dtype | None,
) -> Cache:
    flat, pages, mapped = _mapped(driver, layout, blocks, range_bytes)
    views = [
        block_view(layout, pages, buffer, model.block_shape, BF16_BYTES)
        for buffer in range(model.buffers)
    ]
    ids = [block_id for page in mapped for block_id in layout.ids(page)]
    return _cache(name, flat, views, ids[len(ids) - blocks :], dtype)


def _mapped(
    driver: _vmm.Driver, layout: PageLayout, blocks: int, range_bytes: int
) -> tuple[torch.Tensor, int, list[int]]:
    """A range as flat bytes, its pages, and those with memory; the tensor keeps it alive."""
    from kvelastic.pool import tensors

    in_use = layout.pages_for_blocks(blocks)
    pages = max(in_use, range_bytes // layout.page_bytes)
    mapped = spread(in_use, pages)
    memory = own_pages.reserve(driver, layout, pages)
    memory.map(mapped)
    return tensors.whole_range(memory), pages, mapped


def spread(in_use: int, pages: int) -> list[int]:
    """So many of `pages`, evenly; the first, where tensors begin, and the last are among them."""
    if in_use == 1 and pages > 1:
        in_use = 2
    return [i * (pages - 1) // max(in_use - 1, 1) for i in range(in_use)]


def _cache(
    name: str,
    flat: torch.Tensor,
    views: list[TensorView],
    ids: list[int],
    dtype: torch.dtype | None,
) -> Cache:
    import torch

    from kvelastic.pool import tensors

    buffers = [tensors.view_of(flat, view, dtype or torch.bfloat16) for view in views]
    layers = list(zip(buffers[::2], buffers[1::2], strict=True))
    return Cache(name, layers, torch.tensor(ids, device=flat.device))
