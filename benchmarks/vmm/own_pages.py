"""kvelastic's own range and pool over a layout, made the way that the product makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvelastic import _vmm
    from kvelastic.pool.layout import PageLayout


def reserve(driver: _vmm.Driver, layout: PageLayout, pages: int) -> _vmm.Range:
    """Addresses for `pages` pages of this layout; no memory yet."""
    from kvelastic import _vmm
    from kvelastic.pool.pool import native_geometry

    return _vmm.Range.reserve(driver, native_geometry(layout, pages))


def pool_over(memory: _vmm.Range | _vmm.Ring) -> _vmm.Pool:
    """A pool that may fill the range and maps nothing ahead of demand."""
    from kvelastic import _vmm

    whole = memory.geometry
    total_bytes = whole.pages * whole.page_bytes
    return _vmm.Pool(
        memory,
        max_blocks=whole.pages * whole.blocks_per_page,
        limit_bytes=total_bytes,
        capacity_bytes=total_bytes,
        preallocate=False,
    )
