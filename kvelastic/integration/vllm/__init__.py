"""vLLM on an elastic KV cache.

The sequence, by vLLM process:

1. Every process: vLLM's plugin loader calls `plugin.register`. It does nothing unless
   `ENABLE_KVELASTIC=true`. Otherwise it checks the version (`hooks.versions`) and arms the hooks.
2. Every hooked process, on import of a hooked module: kvelastic probes everything that it touches,
   then wraps it (`integration.hooks`). `patches` lists the hooks. `in_front_end`,
   `in_engine_core` and `in_worker` contain the wrappers.
3. Engine core, first: the executor is a subclass of vLLM's choice (`executor_class`). It names the
   subclasses of the worker, the scheduler and the connector in vLLM's settings
   (`worker_class`, `scheduler_class`, `connector_class`, `subclasses`).
4. Engine core, once the size of the KV cache is known: `scheduler_side` creates the segment, the
   pool and the ring. `cache_shape` rewrites the workers' cache configurations to the paged layout.
5. Every worker: `worker_side` attaches to the segment and replaces vLLM's single KV cache
   allocation with the arena's address range, of which few pages are mapped yet.
6. Engine core, every step: `block_pool` hands out the pool's sparse block ids. It holds back
   blocks that a step in flight may still use (`steps`).

`interfaces` is the other entry point: kvcached's Python API, for engines that call it directly.
Importing this package imports none of the modules above.
"""
