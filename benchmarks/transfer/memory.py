"""Memory as pools have it: a range of the host driver, all of it mapped."""

from __future__ import annotations

from kvelastic import _vmm
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import native_geometry

PAGE_BYTES = 2 << 20


def mapped(size_bytes: int, block_bytes: int) -> _vmm.Range:
    pages = size_bytes // PAGE_BYTES
    blocks = PAGE_BYTES // block_bytes - (1 if PAGE_BYTES % block_bytes else 0)
    layout = PageLayout(block_bytes, 1, max(blocks, 1), PAGE_BYTES)
    memory = _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(layout, pages))
    memory.map(list(range(pages)))
    return memory
