"""The values that the scheduler sends to a worker so that it can attach."""

from __future__ import annotations

from dataclasses import dataclass

from kvelastic.pool.layout import PageLayout

HANDOFF = "kvelastic"
"""Attribute of a worker's `KVCacheConfig` that holds its `Handoff`; vLLM sends it along with the
configuration."""


@dataclass(frozen=True)
class Handoff:
    """What a worker needs to attach; plain values sent with its `KVCacheConfig`."""

    rank: int
    device: str
    """The device to which the scheduler accounts this worker's pages: `host`, or a GPU's UUID."""
    segment_name: str
    segment_uuid: bytes
    layout: PageLayout
    pages: int
    vllm_block_bytes: int
    """Bytes of a block over all layers of this worker, by vLLM's own calculation."""
