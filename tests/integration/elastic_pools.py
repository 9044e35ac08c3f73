"""vLLM's block pool over real memory, without an engine.

arena, memory = make_memory()
pool = make_pool(memory)
"""

from __future__ import annotations

from typing import Any

from kvelastic import _vmm
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import native_geometry

LAYOUT = PageLayout.solve(32 << 10, 4)
PAGES = 6

_open: list[_vmm.Pool] = []


def make_memory(max_cached_blocks: int = -1, pages: int = PAGES) -> tuple[_vmm.Range, _vmm.Pool]:
    arena = _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(LAYOUT, pages))
    pool = _vmm.Pool(
        arena,
        max_blocks=pages * LAYOUT.blocks_per_page,
        limit_bytes=pages * LAYOUT.page_bytes,
        capacity_bytes=pages * LAYOUT.page_bytes,
        min_reserved_pages=0,
        max_reserved_pages=0,
        max_cached_blocks=max_cached_blocks,
        movable=True,
    )
    _open.append(pool)
    return arena, pool


def make_pool(memory: _vmm.Pool, pages: int = PAGES, **options: Any) -> Any:
    from kvelastic.integration.vllm.block_pool import ElasticBlockPool

    settings_of_vllm: dict[str, Any] = {"enable_caching": True, "hash_block_size": 32, **options}
    return ElasticBlockPool(
        pages * LAYOUT.blocks_per_page,
        memory=memory,
        id_span=LAYOUT.id_span(pages),
        **settings_of_vllm,
    )


def key_of(number: int) -> bytes:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    key: bytes = make_block_hash_with_group_id(number.to_bytes(8, "big"), 0)
    return key


def close_all() -> None:
    """Return the memory of every pool: vLLM keeps pools in reference cycles, which end late."""
    while _open:
        _open.pop().close(discard=True)
