"""Opens the tiers of an SGLang pool. Imported only if `KVELASTIC_TIERS` is set.

The namespace is everything besides its tokens that changes a block's bytes. SGLang's block hash
covers all tokens up to its end, a salt and an extra key. The contents of the weight files are
hashed in the background, and stores add them (`kvelastic.tiers.stores.identified`). Without files
the namespace is unique to this process: no later process finds its records.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

from kvelastic.config import Config
from kvelastic.integration.hooks.versions import installed_version
from kvelastic.integration.sglang.prefix_loads import PrefixLoads
from kvelastic.integration.sglang.refusals import refuse_tiers
from kvelastic.pool.engine_pool import EnginePool
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.opening import open_tiers
from kvelastic.tiers.weights_fingerprint import WeightFiles


def open_for(
    settings: Config, elastic: EnginePool, scheduler: Any, weights: WeightFiles | None
) -> PrefixLoads | None:
    """Open the configured tiers for this scheduler's radix cache; return None if none is useful.

    `weights` are the files as they were before SGLang loaded them; they are hashed in the
    background. Blocks while stores open, and raises their errors. Raises `UnsupportedEngineError`
    without a radix cache.
    """
    refuse_tiers(scheduler.tree_cache)
    layout = f"{elastic.layout.buffers} buffers of {elastic.layout.block_bytes} bytes a block"
    namespace = namespace_of(
        scheduler.server_args, scheduler.model_config, layout, has_files=weights is not None
    )
    tiers = open_tiers(elastic.pool, settings, namespace, weights=weights)
    return None if tiers is None else PrefixLoads(scheduler.tree_cache, tiers, settings)


def namespace_of(arguments: Any, model: Any, layout: str, *, has_files: bool) -> Namespace:
    """Return the namespace of an SGLang with these arguments, model and block layout.

    `has_files`: the contents of the weight files are added later.
    """
    return Namespace(
        model=str(arguments.model_path),
        weights=_weights(arguments, model, has_files=has_files),
        dtype=f"{model.dtype}/{arguments.kv_cache_dtype}",
        layout=f"SGLang {installed_version('sglang')} on {arguments.device}; {layout}",
        block_tokens=int(arguments.page_size),
        hash_algorithm="SGLang's SHA-256",
    )


def _weights(arguments: Any, model: Any, *, has_files: bool) -> str:
    found = "files" if has_files else f"unknown {secrets.token_hex(16)}"
    settings = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    described = "; ".join((found, str(arguments.revision), str(arguments.quantization), settings))
    return hashlib.sha256(described.encode()).hexdigest()[:32]
