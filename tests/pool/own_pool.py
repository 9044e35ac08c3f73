"""A pool in this process with its maintenance thread, on a ledger of the test's own."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

from kvelastic import config
from kvelastic.config import Config
from kvelastic.device.selection import host
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import ElasticPool, local_range, open_pool

BLOCKS_PER_PAGE = 8
PAGES = 16
LAYOUT = PageLayout(
    block_bytes=64 << 10, buffers=4, blocks_per_page=BLOCKS_PER_PAGE, extent_bytes=2 << 20
)


def own_settings(**changes: Any) -> Config:
    """Nothing is mapped ahead of demand, so that two looks one after the other agree."""
    return replace(
        config.load({}),
        ledger=f"test-{os.getpid()}-{random.randrange(1 << 32):x}",
        host_memory=PAGES * LAYOUT.page_bytes,
        page_prealloc_enabled=False,
        **changes,
    )


def make_pool(settings: Config) -> ElasticPool:
    """Before its maintenance thread starts: nothing of it is published yet."""
    device = host(settings)
    return open_pool(
        settings,
        LAYOUT,
        PAGES,
        num_blocks=PAGES * BLOCKS_PER_PAGE,
        block_tokens=16,
        engine="test",
        devices=[device],
        memory=local_range(device),
    )


def start_pool(settings: Config) -> ElasticPool:
    pool = make_pool(settings)
    pool.start_maintenance()
    return pool
