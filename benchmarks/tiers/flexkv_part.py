"""What FlexKV's interface adds to the index, and its server to that: prompts of 256 blocks.

Prompts that nobody has seen, in a CPU tier with room for 100,000 records of which half are there.
The native part is what both calls cannot do without: the keys (twice), a look, and the claim; the
difference is Python, locks and the blocks of the host's pool. What a put reserves is given up
outside of the time, but in every other round, whose records then come.

A served match and its cancel are compared with two round trips between the same two processes,
which do no work.
"""

from __future__ import annotations

import time
from array import array
from typing import Any

from benchmarks.harness import Figure, compare
from benchmarks.tiers.index_part import BLOCK_TOKENS, BLOCKS, SEED, prompts
from kvelastic._vmm import TierIndex, block_keys
from kvelastic.tiers.base import NO_KEY

ROUNDS, RECORDS = 200, 100_000
BAR = "72 us and 20 us of Python"


def native_us(index: TierIndex, prompt: array[int]) -> float:
    """Keys twice, a look, and a claim, by the native index alone."""
    start = time.perf_counter_ns()
    keys = block_keys(prompt, BLOCK_TOKENS, SEED)
    index.match(keys)
    keys = block_keys(prompt, BLOCK_TOKENS, SEED)
    slots, _ = index.claim(keys, NO_KEY)
    end = time.perf_counter_ns()
    assert len(slots) == BLOCKS
    index.abandon(keys)
    return (end - start) / 1000


def figures() -> list[Figure]:
    """A new prompt, then the same when all of it is there."""
    import numpy as np

    from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
    from kvelastic.flexkv.kvmanager import KVManager

    floor = "keys twice, look and claim in the native index"
    new = Figure("flexkv: get_match + put_match of 256 new blocks", "us", [], BAR, floor)
    hit = Figure("flexkv: get_match of 256 blocks that are there", "us", [], "", "a look of these")
    index = TierIndex(RECORDS)
    model = ModelConfig(num_layers=1, num_kv_heads=1, head_size=16, dtype="float16")
    cache = CacheConfig(tokens_per_block=BLOCK_TOKENS, num_cpu_blocks=RECORDS)
    with KVManager(model, cache) as manager:
        store = next(iter(manager.task_engine.storage.stores.values()))
        records = [memoryview(bytes(store.record_bytes))] * BLOCKS
        for at, prompt in enumerate(prompts(RECORDS // BLOCKS // 2 + ROUNDS, seed=3)):
            tokens = np.array(prompt)
            is_timed = at >= RECORDS // BLOCKS // 2
            if is_timed:
                new.floor_samples.append(native_us(index, prompt))
            start = time.perf_counter_ns()
            found, mask = manager.get_match(tokens)
            task, unmatched = manager.put_match(tokens)
            end = time.perf_counter_ns()
            assert not mask.any()
            assert unmatched.all()
            if is_timed:
                new.samples.append((end - start) / 1000)
            keys = manager.task_engine.cache_engine.sequence(tokens).keys
            if at % 2 or not is_timed:
                assert all(store.put(keys, records, chain_after=NO_KEY))
            manager.cancel(task)
            if is_timed and at % 2:
                start = time.perf_counter_ns()
                task, mask = manager.get_match(tokens)
                end = time.perf_counter_ns()
                assert mask.all()
                hit.samples.append((end - start) / 1000)
                start = time.perf_counter_ns()
                store.leading(keys)
                hit.floor_samples.append((time.perf_counter_ns() - start) / 1000)
                manager.cancel(task)
            del found
    return [new, hit, served(model, cache)]


def served(model: Any, cache: Any) -> Figure:
    """A match that finds nothing and its cancel, at a server in a child process."""
    import numpy as np

    from kvelastic.flexkv.server.client import KVDPClient
    from kvelastic.flexkv.server.server import KVServer
    from kvelastic.flexkv.server.utils import unique_endpoint

    endpoint = unique_endpoint()
    server = KVServer.create_server(model, cache, server_recv_port=endpoint)
    client = KVDPClient(endpoint, model)
    tokens = np.arange(BLOCKS * BLOCK_TOKENS)
    try:
        client.start()
        return compare(
            "flexkv: get_match + cancel of 256 blocks at a server",
            lambda: client.cancel(client.get_match(tokens)[0]),
            floor=("two round trips", lambda: (client.is_ready(), client.is_ready())),
            calls=500,
        )
    finally:
        client.unregister()
        server.shutdown()
