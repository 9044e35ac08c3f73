"""Opens the tiers of a vLLM's pool. Imported only if `KVELASTIC_TIERS` is set."""

from __future__ import annotations

from typing import Any

from kvelastic.config import Config
from kvelastic.integration.hooks.versions import installed_version
from kvelastic.integration.vllm.tier_namespace import namespace_of
from kvelastic.pool.pool import ElasticPool
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.opening import open_tiers
from kvelastic.tiers.weights_fingerprint import WeightFiles


def open_for(
    settings: Config,
    pool: ElasticPool,
    vllm_config: Any,
    cache_config: Any,
    weights: WeightFiles | None,
) -> Tiers | None:
    """Open the configured tiers for the blocks of a pool; return None if none is useful.

    `weights` are the files as they were before the engine loaded them; they are hashed in the
    background. Blocks while stores open, and raises their errors.
    """
    namespace = namespace_of(
        vllm_config,
        cache_config,
        pool.blocks.record_bytes,
        version=installed_version("vllm"),
        has_files=weights is not None,
    )
    return open_tiers(pool, settings, namespace, weights=weights)
