"""What tiers do not cover of a vLLM's configuration, refused before a model is loaded.

Everything here would find KV that is not that of the request, or nothing at all.
"""

from __future__ import annotations

from typing import Any, Final

from kvelastic.errors import UnsupportedEngineError
from kvelastic.integration.vllm import tier_connector

_KINDS: Final = frozenset(
    {
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "UniformTypeKVCacheSpecs",
        "SlidingWindowSpec",
    }
)
"""Of groups whose blocks hold KV of their own tokens, by which vLLM names them."""


def refuse_without_tiers(vllm_config: Any) -> None:
    """Raise `UnsupportedEngineError` if vLLM is to ask tiers and there are none."""
    if tier_connector.is_ours(vllm_config.kv_transfer_config):
        raise UnsupportedEngineError(
            "kvelastic's spec of the OffloadingConnector is configured, and KVELASTIC_TIERS names "
            "no tier. Set it, and leave out --kv-transfer-config: it is filled in."
        )


def refuse_for_tiers(vllm_config: Any) -> None:
    """Raise `UnsupportedEngineError` naming every setting that tiers do not cover."""
    found = []
    if not tier_connector.is_ours(vllm_config.kv_transfer_config):
        found.append("another KV connector than the one that is filled in for tiers")
    if not vllm_config.cache_config.enable_prefix_caching:
        found.append("--no-enable-prefix-caching: blocks have no names then to be found by")
    if vllm_config.speculative_config is not None:
        found.append("speculative decoding: the blocks of drafts are not tried with tiers")
    parallel = vllm_config.parallel_config
    found += [
        f"{name}_parallel_size > 1: not tried with tiers"
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
    """Raise `UnsupportedEngineError` if the KV cache has layers that tiers do not cover."""
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


def _refuse(found: list[str]) -> None:
    if found:
        raise UnsupportedEngineError(
            "KVELASTIC_TIERS does not cover what this vLLM was started with:\n"
            + "\n".join(f"  - {line}" for line in found)
            + "\nUnset KVELASTIC_TIERS to run this without tiers."
        )
