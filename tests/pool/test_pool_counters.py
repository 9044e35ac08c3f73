"""The counters of pages: created where a pool grows, destroyed where it shrinks."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from waiting import DEADLINE_S

from kvelastic import config, ledger, segment
from kvelastic.device import host
from kvelastic.layout import PageLayout
from kvelastic.pool import ElasticPool, local_range, open_pool

B = 8
PAGES = 16
LAYOUT = PageLayout(block_bytes=64 << 10, buffers=4, blocks_per_page=B, extent_bytes=2 << 20)


@pytest.fixture
def pool() -> Iterator[ElasticPool]:
    """A pool without a keeper's own doings: nothing is mapped ahead or given back when idle."""
    settings = replace(
        config.load({}),
        ledger=f"test-{os.getpid()}-{random.randrange(1 << 32):x}",
        host_memory=PAGES * LAYOUT.page_bytes,
        page_prealloc_enabled=False,
        idle_trim_s=None,
    )
    device = host(settings)
    made = open_pool(
        settings,
        LAYOUT,
        PAGES,
        num_blocks=PAGES * B,
        block_tokens=16,
        engine="test",
        devices=[device],
        memory=local_range(device),
    )
    made.start_keeper()
    yield made
    made.close(discard=True)
    ledger.reap()


def test_pages_are_counted_as_they_are_created_and_destroyed(pool: ElasticPool) -> None:
    record = pool.segment.record

    def counted() -> tuple[int, int]:
        counters = record.counters()
        assert counters["pages_created"] == counters["pages_mapped"]
        assert counters["pages_destroyed"] == counters["pages_unmapped"]
        held = counters["pages_created"] - counters["pages_destroyed"]
        assert held * LAYOUT.page_bytes == pool.blocks.mapped_bytes
        assert held * LAYOUT.page_bytes == pool.places.granted_bytes
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
        counters = outside.record.counters()
        assert counters["pages_created"] == counters["pages_destroyed"] == grown
