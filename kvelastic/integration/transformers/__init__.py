"""Hugging Face transformers on an elastic KV cache.

Continuous batching (`generate_batch`, the manager, `transformers serve --continuous-batching`), by
`ENABLE_KVELASTIC=true` alone, in this order:

1. Python starts: `kvelastic.startup` only arms an import hook;
2. a program makes its first `ContinuousBatchingManager`: `plugin.register` checks the version, and
   `patches` probes and then wraps the functions in use. The manager raises a failure of this,
   because programs that never make a manager import the same modules;
3. a cache is made (`in_cache`): `cache_memory` makes the segment, the pool and the maintenance
   thread, and returns addresses without memory for transformers' single allocation. `sector_pool`
   and `prefix_ledger` replace its free list and its record of cached blocks. The cache of 5.17 has
   tensors per layer: the `block_*` modules are for it only;
4. every batch (`in_batches`): evictions are followed, blocks are taken and released. If no block is
   available, the loop waits instead of ending.

The alternative is a cache for `model.generate(past_key_values=...)`::

    from kvelastic.integration.transformers import ElasticCache

Importing this package imports none of these modules, nor torch or transformers. Access to
`ElasticCache` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvelastic.integration.transformers.elastic_cache import ElasticCache

__all__ = ["ElasticCache"]


def __getattr__(name: str) -> Any:
    if name == "ElasticCache":
        from kvelastic.integration.transformers.elastic_cache import ElasticCache

        return ElasticCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
