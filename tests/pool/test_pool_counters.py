"""The counters of pages: created where a pool grows, destroyed where it shrinks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from own_pool import BLOCKS_PER_PAGE as B
from own_pool import LAYOUT, make_pool, own_settings, start_pool
from waiting import DEADLINE_S

from kvelastic.pool.pool import ElasticPool
from kvelastic.shared import ledger, segment


@pytest.fixture
def pool() -> Iterator[ElasticPool]:
    """A pool that maps nothing ahead and releases nothing when idle."""
    made = start_pool(own_settings(idle_trim_s=None))
    yield made
    made.close(discard=True)
    ledger.reap()


def test_page_creation_and_destruction_are_counted(pool: ElasticPool) -> None:
    record = pool.segment.control_block

    def counted() -> tuple[int, int]:
        counters = record.counters()
        assert counters["pages_created"] == counters["pages_mapped"]
        assert counters["pages_destroyed"] == counters["pages_unmapped"]
        held = counters["pages_created"] - counters["pages_destroyed"]
        assert held * LAYOUT.page_bytes == pool.blocks.mapped_bytes
        assert held * LAYOUT.page_bytes == pool.device_set.granted_bytes
        return counters["pages_created"], counters["pages_destroyed"]

    with segment.open_readonly(pool.name) as outside:
        ids = pool.blocks.alloc(6 * B)
        assert ids
        created, destroyed = counted()
        assert created >= 6
        assert destroyed == 0
        pool.blocks.free(ids[B:])
        assert counted() == (created, 0), "parked pages are still there"
        trimmed = pool.blocks.trim() // LAYOUT.page_bytes
        assert trimmed > 0
        assert counted() == (created, trimmed)
        cached = pool.blocks.alloc(4 * B)
        assert cached
        grown, _ = counted()
        assert grown > created
        pool.blocks.cache(cached)
        answer = segment.request(pool.name, limit_bytes=3 * LAYOUT.page_bytes, wait_s=DEADLINE_S)
        assert answer.state == "applied"
        assert counted()[1] > trimmed
        pool.close(discard=True)
        counters = outside.control_block.counters()
        assert counters["pages_created"] == counters["pages_destroyed"] == grown


def test_control_block_includes_counts_from_before_maintenance() -> None:
    made = make_pool(own_settings())
    try:
        assert made.blocks.alloc(
            1
        )  # as vLLM takes its null block, before the maintenance thread starts
        made.start_maintenance()
        record = made.segment.control_block
        counters, usage = record.counters(), record.read_usage()
        assert counters["pages_mapped"] == counters["pages_created"] == usage["pages_mapped"] > 0
        assert counters["allocs"] == made.blocks.stats()["allocs"]
    finally:
        made.close(discard=True)
        ledger.reap()
