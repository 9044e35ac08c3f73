"""`KVELASTIC_MAX_CACHED_TOKENS` in blocks: what is less than a block turns nothing off unsaid."""

from __future__ import annotations

import os
import random

import pytest

from kvelastic import config
from kvelastic.device.selection import host
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import local_range, open_pool

BLOCK_TOKENS = 128
LAYOUT = PageLayout.solve(64 << 10, 4)


@pytest.mark.parametrize(
    ("tokens", "cached", "warned"),
    [(0, 0, False), (1, 1, True), (127, 1, True), (128, 1, False), (300, 2, False), (-1, 4, False)],
)
def test_cached_tokens_below_a_block_warn(
    tokens: int, cached: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config.load(
        {"KVELASTIC_MAX_CACHED_TOKENS": str(tokens), "KVELASTIC_HOST_MEMORY": "64M"}
    )
    device = host(settings)
    name = f"kvbound-{os.getpid()}-{random.randrange(1 << 40):x}"
    with open_pool(
        settings, LAYOUT, 2, num_blocks=16, block_tokens=BLOCK_TOKENS, engine="test",
        devices=[device], memory=local_range(device), name=name,
    ) as pool:  # fmt: skip
        ids = pool.blocks.alloc(4)
        assert ids is not None
        pool.blocks.cache(ids)
        assert pool.blocks.stats()["blocks_cached"] == cached
    assert ("less than one block of 128 tokens" in caplog.text) is warned
