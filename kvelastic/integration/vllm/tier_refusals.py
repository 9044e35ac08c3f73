"""Refuses vLLM settings that tiers do not support, before a model is loaded.

With these settings a request would find wrong KV, or none.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from kvelastic.errors import UnsupportedEngineError
from kvelastic.integration.hooks.probe import refuse
from kvelastic.integration.vllm.connector_settings import exchanges, is_ours

_refuse: Final = partial(
    refuse,
    "KVELASTIC_TIERS and KVELASTIC_ROLE do not support these settings of vLLM:",
    way_out="Unset both to run this without tiers and other engines' blocks.",
)

_KINDS: Final = frozenset(
    {
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "UniformTypeKVCacheSpecs",
        "SlidingWindowSpec",
    }
)
"""Groups whose blocks hold KV of the tokens by which vLLM names them."""


def refuse_without_tiers(vllm_config: Any) -> None:
    """Raise `UnsupportedEngineError` if vLLM uses our spec and no tier is configured."""
    if is_ours(vllm_config.kv_transfer_config):
        raise UnsupportedEngineError(
            "kvelastic's connector is configured, but neither KVELASTIC_TIERS nor KVELASTIC_ROLE "
            "is set. Set one of them and omit --kv-transfer-config, which is then automatic."
        )


def refuse_for_tiers(vllm_config: Any) -> None:
    """Raise `UnsupportedEngineError` naming every setting that tiers do not support."""
    found = []
    if exchanges(vllm_config.kv_transfer_config) and vllm_config.device_config.device_type != "cpu":
        found.append("KVELASTIC_ROLE on a GPU: tested with caches in host memory only")
    if not is_ours(vllm_config.kv_transfer_config):
        found.append("a KV connector other than kvelastic's, which tiers configure")
    if not vllm_config.cache_config.enable_prefix_caching:
        found.append("--no-enable-prefix-caching: blocks then have no hashes to find them by")
    if vllm_config.speculative_config is not None:
        found.append("speculative decoding: draft blocks are not tested with tiers")
    parallel = vllm_config.parallel_config
    found += [
        f"{name}_parallel_size > 1: not tested with tiers"
        for name in ("decode_context", "prefill_context")
        if getattr(parallel, f"{name}_parallel_size", 1) > 1
    ]
    if vllm_config.kv_transfer_config is not None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        found += [
            f"{setting} for tiers (kv_connector_extra_config): a record is one block"
            for setting in ("block_size", "blocks_per_chunk")
            if setting in extra
        ]
    _refuse(found)


def refuse_cache_for_tiers(cache_config: Any) -> None:
    """Raise `UnsupportedEngineError` if the KV cache has layers that tiers do not support."""
    kinds = dict.fromkeys(
        type(group.kv_cache_spec).__name__ for group in cache_config.kv_cache_groups
    )
    _refuse(
        [
            f"layers of the kind {kind}, whose blocks are not named by tokens alone"
            for kind in kinds
            if kind not in _KINDS
        ]
    )
