"""vLLM on an elastic KV cache.

What happens in which of vLLM's processes, in order:

1. every process: vLLM's loader calls `plugin.register`, which does nothing unless
   `ENABLE_KVELASTIC=true`, and else checks the version and arms the patches (`late_import`);
2. engine core: when `vllm.v1.engine.core` is imported, the patches of this version (`v0_32`) are
   probed (`probe`) and set; when the KV cache's size is known, `scheduler_side` makes the segment,
   the pool and the ring, and rewrites the workers' cache configuration to the paged layout;
3. worker: `worker_side` attaches to the segment and answers vLLM's one KV allocation with the
   arena's addresses, most of which have no memory behind them yet;
4. engine core, every step: `block_pool` hands out the pool's sparse block ids.

`interfaces` is the other way in: the seed's Python API, for engines that call it themselves.
Importing this package imports nothing of the above.
"""
