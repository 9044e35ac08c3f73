"""How many pages vLLM's cache gets, and what is said where that is less than a request may need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvelastic import _vmm
from kvelastic.device.selection import Device
from kvelastic.integration.vllm import scheduler_side
from kvelastic.pool.layout import PageLayout

MIB = 1 << 20
LAYOUT = PageLayout.solve(MIB // 8, 1, page_size_bytes=2 * MIB)
"""Sixteen blocks in a page of 2 MiB."""


def pages(device: str, *, capacity: int, wanted: int, longest: int) -> int:
    """All in blocks but for the answer."""
    place = Device(device, capacity * MIB // 8, _vmm.HostDriver)
    return scheduler_side._pages([place], LAYOUT, wanted, longest)


def test_capacity_limited_cache_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert pages("host", capacity=64, wanted=32, longest=31) == 2
    assert pages("host", capacity=64, wanted=6400, longest=63) == 4
    assert caplog.text == ""


def test_request_larger_than_the_cache_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert pages("host", capacity=64, wanted=6400, longest=64) == 4
    assert "holds at most 8.00 MiB of KV cache (4 pages of 2.00 MiB)" in caplog.text
    assert "needs 10.00 MiB and would wait until it is aborted" in caplog.text
    assert "Set KVELASTIC_HOST_MEMORY to 10.00 MiB or more, or set a lower --max-" in caplog.text
    caplog.clear()
    assert pages("GPU-1", capacity=1, wanted=6400, longest=100) == 1
    assert "GPU-1 holds at most 2.00 MiB" in caplog.text
    assert "KVELASTIC_HOST_MEMORY" not in caplog.text


def test_longest_request_counts_blocks_of_every_group() -> None:
    def group(tokens: int, block_bytes: int) -> Any:
        spec = SimpleNamespace(
            page_size_bytes=block_bytes,
            max_memory_usage_bytes=lambda config: -(-config.longest // tokens) * block_bytes,
        )
        return SimpleNamespace(kv_cache_spec=spec)

    config = SimpleNamespace(kv_cache_groups=[group(16, 4096), group(32, 8192)])
    blocks = scheduler_side._longest_request_blocks(SimpleNamespace(longest=100), config)
    assert blocks == 7 + 4
