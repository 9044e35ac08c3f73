"""Opens the tiers of a vLLM's pool. Imported only with `KVELASTIC_TIERS` or `KVELASTIC_ROLE`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvelastic.config import Config
from kvelastic.errors import UnsupportedError
from kvelastic.integration.hooks.versions import installed_version
from kvelastic.integration.vllm.in_tiers import EngineTiers
from kvelastic.integration.vllm.record_split import LayerTensor, split_of
from kvelastic.integration.vllm.tier_namespace import namespace_of
from kvelastic.pool.pool import ElasticPool
from kvelastic.tiers.opening import open_tiers, staging_slots
from kvelastic.tiers.stores.peer.engine import Peers
from kvelastic.tiers.stores.peer.split import Split
from kvelastic.tiers.weights_fingerprint import WeightFiles

_log = logging.getLogger("kvelastic.vllm")


def open_for(
    settings: Config,
    pool: ElasticPool,
    vllm_config: Any,
    cache_config: Any,
    weights: WeightFiles | None,
    tensors: Sequence[Sequence[LayerTensor]],
    block_bytes: int,
) -> EngineTiers | None:
    """Open the configured tiers for the blocks of a pool; return None if none is useful.

    With `KVELASTIC_ROLE`, other engines' blocks are one of them. `weights` are the files as they
    were before the engine loaded them; they are hashed in the background. `tensors` are the layers'
    of each rank, and `block_bytes` is a block in one buffer. Blocks while stores open, and raises
    their errors.
    """
    version = installed_version("vllm")
    namespace = namespace_of(
        vllm_config,
        cache_config,
        pool.blocks.record_bytes,
        version=version,
        has_files=weights is not None,
    )
    if settings.role is None:
        only = open_tiers(pool, settings, namespace, weights=weights)
        return None if only is None else EngineTiers(only, settings)
    slots = staging_slots(settings, pool.blocks.record_bytes)
    split: Split | None = None
    try:
        split = split_of(
            vllm_config,
            cache_config,
            tensors,
            version=version,
            block_bytes=block_bytes,
            record_bytes=pool.blocks.record_bytes,
        )
    except UnsupportedError as error:
        _log.info(
            "Blocks are exchanged only with engines of the same tensor parallel size: %s", error
        )
    peers = Peers(settings, pool, staging_slots=slots, identified=weights is None, split=split)
    try:
        tiers = open_tiers(pool, settings, namespace, weights=weights, peer=peers.store)
    except BaseException:
        peers.close()
        raise
    assert tiers is not None
    tiers.attach(peers.close)
    return EngineTiers(tiers, settings, peers)
