"""Opens the tiers of a vLLM's pool. Imported only with `KVELASTIC_TIERS` or `KVELASTIC_ROLE`."""

from __future__ import annotations

from typing import Any

from kvelastic.config import Config
from kvelastic.integration.hooks.versions import installed_version
from kvelastic.integration.vllm.tier_namespace import namespace_of
from kvelastic.pool.pool import ElasticPool
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.opening import TierSettings, open_tiers
from kvelastic.tiers.stores.peer.engine import Peers
from kvelastic.tiers.weights_fingerprint import WeightFiles


def open_for(
    settings: Config,
    pool: ElasticPool,
    vllm_config: Any,
    cache_config: Any,
    weights: WeightFiles | None,
) -> tuple[Tiers, Peers | None] | None:
    """Open the configured tiers for the blocks of a pool; return None if none is useful.

    With `KVELASTIC_ROLE`, other engines' blocks are one of them. `weights` are the files as they
    were before the engine loaded them; they are hashed in the background. Blocks while stores open,
    and raises their errors.
    """
    namespace = namespace_of(
        vllm_config,
        cache_config,
        pool.blocks.record_bytes,
        version=installed_version("vllm"),
        has_files=weights is not None,
    )
    if settings.role is None:
        only = open_tiers(pool, settings, namespace, weights=weights)
        return None if only is None else (only, None)
    slots = TierSettings.of(settings).staging_slots(pool.blocks.record_bytes)
    peers = Peers(settings, pool, staging_slots=slots, identified=weights is None)
    try:
        tiers = open_tiers(pool, settings, namespace, weights=weights, peer=peers.store)
    except BaseException:
        peers.close()
        raise
    assert tiers is not None
    tiers.attach(peers)
    return tiers, peers
