"""The namespace of a vLLM's tiers: everything besides its tokens that changes a block's bytes.

vLLM's block hash covers the tokens up to the block's end, multi-modal inputs, a salt and a LoRA's
name. The namespace covers the rest, except the contents of the weight files: these are hashed in
the background, and stores add them (`kvelastic.tiers.stores.identified`). If the weights are
neither files nor of a known commit, the namespace is unique to this process: no later process finds
its records.

Reads fields of vLLM's configuration; imports neither vLLM nor torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.weights_fingerprint import RANDOM_WEIGHTS, WeightFiles

_STABLE_HASHES: Final = frozenset({"sha256", "sha256_cbor"})
"""Hash algorithms with the same seed in every process, unless PYTHONHASHSEED sets another."""
_GROUP_BYTES: Final = 4
"""vLLM's block hash ends with the block's group in this many bytes, most significant first."""


def weight_files_of(vllm_config: Any) -> WeightFiles | None:
    """Return the weight files that an engine with this configuration is about to load.

    Returns None if the weights come from elsewhere or the files are unreadable, which is logged.
    """
    return WeightFiles.look(
        str(vllm_config.model_config.model), vllm_config.load_config.load_format
    )


def namespace_of(
    vllm_config: Any,
    cache_config: Any,
    record_bytes: int,
    *,
    version: str,
    has_files: bool,
    environ: Mapping[str, str] = os.environ,
) -> Namespace:
    """Return the namespace of an engine with this configuration and KV cache.

    `has_files`: the contents of the weight files are added later.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    groups = cache_config.kv_cache_groups
    return Namespace(
        model=str(model.model),
        weights=_weights(model, vllm_config.load_config.load_format, has_files=has_files),
        dtype=f"{model.dtype}/{vllm_config.cache_config.cache_dtype}",
        layout=layout_of(
            vllm_config,
            [(len(group.layer_names), group.kv_cache_spec) for group in groups],
            version,
        ),
        block_tokens=int(groups[0].kv_cache_spec.block_size),
        record_bytes=record_bytes,
        ranks=", ".join(
            f"{name} {getattr(parallel, name + '_parallel_size', 1)}"
            for name in ("tensor", "pipeline", "decode_context", "prefill_context")
        ),
        hash_algorithm=_hash_algorithm(vllm_config.cache_config.prefix_caching_hash_algo, environ),
    )


def layout_of(vllm_config: Any, groups: Sequence[tuple[Any, Any]], version: str) -> str:
    """Describe the bytes of a block. A group is its layers, by number or name, and their spec."""
    return "; ".join(
        [
            f"vLLM {version} on {vllm_config.device_config.device_type}",
            str(vllm_config.cache_config.kv_cache_layout),
            *(f"{layers} x {spec!r}" for layers, spec in groups),
        ]
    )


def _weights(model: Any, load_format: str, *, has_files: bool) -> str:
    commit = getattr(model.hf_config, "_commit_hash", None)
    if has_files:
        found = "files"
    elif commit and load_format != RANDOM_WEIGHTS:
        found = f"commit {commit}"
    else:
        found = f"unknown {secrets.token_hex(16)}"
    described = "; ".join((found, str(model.revision), str(model.quantization), _settings(model)))
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def _settings(model: Any) -> str:
    """Return the effective model configuration, with overrides from the command line."""
    as_dict = getattr(model.hf_config, "to_dict", None)
    settings = as_dict() if callable(as_dict) else vars(model.hf_config)
    return json.dumps(settings, sort_keys=True, default=str)


def _hash_algorithm(name: str, environ: Mapping[str, str]) -> str:
    seed = environ.get("PYTHONHASHSEED")
    if seed is None and name not in _STABLE_HASHES:
        seed = secrets.token_hex(16)  # vLLM seeds each process randomly
    return f"{name} from {seed!r}"


def key_of(namespace: Namespace, hash_with_group: bytes) -> bytes:
    """Return the key of a block from vLLM's hash and group, concatenated in one `bytes`."""
    group = int.from_bytes(hash_with_group[-_GROUP_BYTES:], "big")
    return namespace.key_of(hash_with_group[:-_GROUP_BYTES], group)
