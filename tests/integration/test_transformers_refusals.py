"""What the transformers integration refuses, and when."""

from __future__ import annotations

import os
from types import SimpleNamespace

import needs
import pytest
from changed_engine import outcomes_of

from kvelastic.errors import UnsupportedEngineError
from kvelastic.integration.transformers.in_cache import refuse_configuration

pytestmark = [needs.transformers, pytest.mark.timeout(600)]


@pytest.mark.slow
def test_unexpected_transformers_code_is_rejected_with_the_difference() -> None:
    changes = {
        "del pool.CachePool.free_blocks": "free_blocks: expected to exist",
        "import transformers; transformers.__version__ = '5.99.0'; del pool.CachePool.__init__": (
            "CachePool.__init__: expected parameters"
        ),
        "pool.CachePool.more = lambda self: self.free_sectors": (
            "expected 'free_sectors' to be used by"
        ),
        "cache.PagedAttentionCache.can_store_request_tokens = lambda self, state: True": (
            "expected parameters ('self', 'state', 'request_len', 'dry_run')"
        ),
        "api.ContinuousBatchProcessor.prepare_next_batch = lambda self: True": (
            "expected it to use ['clear_cancelled_requests', 'offload_requests', 'schedule_batch']"
        ),
    }
    outcomes = outcomes_of(
        changes,
        {**os.environ, "ENABLE_KVELASTIC": "true", "KVELASTIC_STRICT": "false"},
        "transformers",
    )
    for (change, found), (status, text) in zip(changes.items(), outcomes, strict=True):
        assert status != 0, change
        assert "UnsupportedEngineError" in text, change
        assert found in text, change
        assert "docs/transformers.md" in text, change


@pytest.mark.parametrize(
    ("device", "ranks", "at_once", "named"),
    [
        ("mps", 1, False, "the device 'mps': cpu and cuda are covered"),
        ("cuda", 2, False, "tensor parallelism over 2 processes"),
        ("cpu", 1, True, "use_async_batching=True"),
    ],
)
def test_unsupported_configuration_is_named(
    device: str, ranks: int, at_once: bool, named: str
) -> None:
    refuse_configuration(
        SimpleNamespace(use_async_batching=False),
        SimpleNamespace(type="cpu"),
        SimpleNamespace(tp_size=1),
    )
    with pytest.raises(UnsupportedEngineError, match="Unset ENABLE_KVELASTIC") as refused:
        refuse_configuration(
            SimpleNamespace(use_async_batching=at_once),
            SimpleNamespace(type=device),
            SimpleNamespace(tp_size=ranks),
        )
    assert named in str(refused.value)
