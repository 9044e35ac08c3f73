"""SGLang on an elastic KV cache, by `ENABLE_KVELASTIC=true` alone, in this order:

1. each process of SGLang loads its plugins: `plugin.register` checks the version, and `patches`
   arms what is hooked. An error there is logged and forgotten by SGLang, which would go on without
   kvelastic; so whatever is refused ends the process (`refusals.ends_process`);
2. the arguments are resolved (`in_arguments`): a page size where none was given, and what is not
   covered is refused before anything is loaded;
3. the scheduler's process makes its KV cache: `kv_pool` makes segment and pool, and SGLang's
   tensors over addresses that have no memory yet; `allocator` takes the ids of these tensors' pages
   from the pool;
4. every round (`in_scheduler`): the radix cache gives up what is over the limit, SGLang schedules
   in a session of the pool, and where a request finds no memory it waits instead of failing.

What SGLang calls a *page* (of tokens) is a block here; a page is what is mapped and unmapped.

kvcached's functions for SGLang are in `interfaces`, and its name for the pool is this one::

    from kvelastic.integration.sglang import ElasticMHATokenToKVPool

Importing this package imports nothing of the above, and neither torch nor SGLang: asking for that
class does.
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
