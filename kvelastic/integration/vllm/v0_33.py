"""What differs in vLLM 0.33 from 0.32: the block pool.

It takes one more argument, which the elastic pool passes on, and leaves null blocks out of every
count, as the elastic pool does for both versions. Everything else that is hooked or probed is the
same; what moved (the planning of KV caches, the start of a wake-up) is not touched.
"""

from __future__ import annotations

from typing import Final

from kvelastic.integration.vllm import v0_32
from kvelastic.integration.vllm.probe import Probe

HOOKS: Final = v0_32.HOOKS


def arm() -> None:
    """See `versions.Adapter.arm`."""
    v0_32.arm_with(_probe_block_pool)


def _probe_block_pool(probe: Probe) -> None:
    v0_32.probe_block_pool(probe, further_arguments=("num_hash_lookahead_tokens", "medium"))
    probe.get("vllm.v1.core.kv_cache_utils:trim_null_head")  # what skips null blocks from here on
