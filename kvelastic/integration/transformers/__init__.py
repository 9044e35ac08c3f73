"""Hugging Face transformers on an elastic KV cache.

Continuous batching (`generate_batch`, the manager, `transformers serve --continuous-batching`), by
`ENABLE_KVELASTIC=true` alone, in this order:

1. Python starts: `kvelastic.startup` arms an import hook, and nothing else;
2. a program makes its first `ContinuousBatchingManager`: `plugin.register` checks the version,
   `patches` has everything that is touched probed and then wrapped. An error of that is the
   manager's: the same modules are imported by programs that never make one;
3. a cache is made (`in_cache`): `cache_memory` makes segment, pool and keeper, and transformers'
   one allocation is answered with addresses that have no memory yet; `sector_pool` and
   `prefix_ledger` take the places of its free list and of its record of cached blocks. The cache
   of 5.17 has tensors for each layer: `block_patches` and the other `block_*` are for it alone;
4. every batch (`in_batches`): what was evicted is followed, blocks are taken and given back, and
   where none can be had for now the loop waits instead of ending.

The other way in is a cache for `model.generate(past_key_values=...)`::

    from kvelastic.integration.transformers import ElasticCache

Importing this package imports nothing of the above, and neither torch nor transformers: asking for
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
