"""vLLM on an elastic KV cache.

What happens in which of vLLM's processes, in order:

1. every process: vLLM's loader calls `plugin.register`, which does nothing unless
   `ENABLE_KVELASTIC=true`, and else checks the version (`hooks.versions`) and arms its hooks;
2. each hooked process, when it imports the module concerned: everything that is touched is probed
   and then wrapped (`kvelastic.hooks`); `patches` says what, `in_front_end`, `in_engine_core` and
   `in_worker` have the wrappers;
3. engine core: when the KV cache's size is known, `scheduler_side` makes the segment, the pool and
   the ring, and `cache_shape` rewrites the workers' cache configurations to the paged layout;
4. every worker: `worker_side` attaches to the segment and answers vLLM's one KV allocation with
   the arena's addresses, most of which have no memory behind them yet;
5. engine core, every step: `block_pool` hands out the pool's sparse block ids, and holds back what
   a step on its way may still use (`steps`).

`interfaces` is the other way in: kvcached's Python API, for engines that call it themselves.
Importing this package imports nothing of the above.
"""
