"""SGLang on an elastic KV cache, enabled by `ENABLE_KVELASTIC=true` alone.

The sequence:

1. Each SGLang process loads its plugins. `plugin.register` checks the version, and `patches` arms
   the hooks. SGLang logs a plugin's error and continues without the plugin. So refusals end the
   process (`refusals.ends_process`).
2. SGLang resolves its arguments (`in_arguments`). kvelastic sets a page size if none was given, and
   refuses unsupported settings before anything is loaded.
3. The scheduler's process creates its KV cache. `kv_pool` creates the segment, the pool, and
   SGLang's tensors over addresses without memory. `allocator` takes page ids from the pool.
4. In every round (`in_scheduler`) the radix cache evicts blocks over the limit, and SGLang
   schedules in a session of the pool. A request without memory waits instead of failing.

SGLang's *page* (of tokens) is called a block here; a page is the unit of mapping.

kvcached's functions for SGLang are in `interfaces`. Its pool has this name::

    from kvelastic.integration.sglang import ElasticMHATokenToKVPool

Importing this package imports neither these modules nor torch and SGLang; using that class does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvelastic.integration.sglang.kv_pool import ElasticMHATokenToKVPool

__all__ = ["ElasticMHATokenToKVPool"]


def __getattr__(name: str) -> Any:
    if name == "ElasticMHATokenToKVPool":
        from kvelastic.integration.sglang.kv_pool import ElasticMHATokenToKVPool

        return ElasticMHATokenToKVPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
