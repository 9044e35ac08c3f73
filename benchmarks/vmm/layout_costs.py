"""Part 3, the arithmetic: handles and driver calls for a GiB of KV in three layouts.

Only calls that manage memory are counted (cuMem*); no memory is there before, none stays after.
kvelastic maps neighbouring pages in one batch with one set_access and one unmap for the run, so its
calls are told twice: page by page, and all pages of the GiB at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from benchmarks.vmm import kvcached_calls
from benchmarks.vmm.kvcached_calls import KvcachedLayout
from benchmarks.vmm.models import GIB, MIB, Model
from kvelastic.pool.layout import PageLayout


@dataclass(frozen=True)
class LayoutCost:
    """What one layout costs for so much KV. A page (id) is what is grown at once."""

    model: str
    layout: str
    page_bytes: int
    pages: int
    handles: int
    recycled_calls: int
    """To grow and shrink with the memory kept; kvcached keeps none, so as given back."""
    given_back_calls: int
    batch_calls: int
    """As recycled, all pages in one batch."""

    def as_dict(self) -> dict[str, int | str]:
        return asdict(self)


def own(model: Model, layout: PageLayout, name: str, kv_bytes: int = GIB) -> LayoutCost:
    """kvelastic's costs; neighbouring pages are one run in each extent of the layout."""
    pages = layout.pages_for_blocks(model.blocks_of(kv_bytes))
    extents = layout.extents_per_page
    handles = pages * extents
    return LayoutCost(
        model.name,
        name,
        layout.page_bytes,
        pages,
        handles,
        recycled_calls=3 * handles,  # map, set_access, unmap
        given_back_calls=5 * handles,  # and create, release
        batch_calls=handles + 2 * extents,  # a map a handle; set_access and unmap once a run
    )


def theirs(model: Model, layout: KvcachedLayout, kv_bytes: int = GIB) -> LayoutCost:
    """kvcached's costs; a block is dropped where it would lie across two pages."""
    per_page = kvcached_calls.PAGE_BYTES // model.block_bytes
    pages = -(-model.blocks_of(kv_bytes) // per_page)
    calls = pages * layout.cycle_calls
    handles = pages * layout.handles
    return LayoutCost(
        model.name, layout.name, layout.page_id_bytes, pages, handles, calls, calls, calls
    )


def all_costs(model: Model, kv_bytes: int = GIB) -> list[LayoutCost]:
    """The three layouts: paged (ours), per block and per layer (kvcached's); ours in two sizes."""
    contiguous = kvcached_calls.contiguous(model)
    as_large = model.paged(contiguous.page_id_bytes)
    return [
        own(model, model.paged(), "paged (kvelastic, 8 blocks a page)", kv_bytes),
        own(model, as_large, f"paged (kvelastic, {as_large.page_bytes // MIB} MiB page)", kv_bytes),
        theirs(model, contiguous, kv_bytes),
        theirs(model, kvcached_calls.per_layer(model), kv_bytes),
    ]
