"""Prefill in one process, decode in another: KV moves between two elastic caches.

    python examples/datadist_two_processes.py

The PROMPT fills a cache layer by layer, which leaves for the DECODER while later layers are still
"computed"; then the DECODER pulls another request's KV by its key.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
from multiprocessing.connection import Connection

from kvelastic.datadist import (
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)

LAYERS = 4
DESC = CacheDesc(2 * LAYERS, [2, 4096], DataType.DT_FLOAT16)  # K and V of each layer, two rows
ADDRESS = ("127.0.0.1", 26000)


def start(role: LLMRole, cluster_id: int) -> LLMDataDist:
    """A cluster with a pool of 64 MiB."""
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.mem_pool_cfg = '{"memory_size": 67108864}'
    config.enable_remote_cache_accessible = True  # peers may push
    if role is LLMRole.DECODER:
        config.listen_ip_info = f"{ADDRESS[0]}:{ADDRESS[1]}"
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def fill(cache: Cache, layer: int, row: int, value: int) -> None:
    """What a model would compute."""
    for tensor in (2 * layer, 2 * layer + 1):
        at = cache.tensor_addrs[tensor] + row * DESC.row_bytes
        ctypes.memset(at, value + layer, DESC.row_bytes)


def show(cache: Cache, row: int) -> list[int]:
    """The first byte of K in each layer."""
    return [
        ctypes.string_at(cache.tensor_addrs[2 * layer] + row * DESC.row_bytes, 1)[0]
        for layer in range(LAYERS)
    ]


class Computed(LayerSynchronizer):
    """A layer may leave when its event is set."""

    def __init__(self) -> None:
        self.events = [threading.Event() for _ in range(LAYERS)]

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait for the layer."""
        return self.events[layer_index].wait()


def push_layers(manager: CacheManager, cache: Cache, target: int) -> LLMStatusCode:
    """Row 0 leaves, each layer as soon as it is there."""
    computed = Computed()
    key = CacheKeyByIdAndIndex(2, target, 0)
    whole = range(LAYERS)
    task = manager.transfer_cache_async(
        cache, computed, [TransferWithCacheKeyConfig(key, whole, whole)]
    )
    for layer in whole:
        fill(cache, layer, row=0, value=10)
        computed.events[layer].set()
    return task.synchronize()


def decode(pipe: Connection) -> None:
    """The DECODER: it listens, and tells the PROMPT which cache to push into."""
    datadist = start(LLMRole.DECODER, 2)
    manager = datadist.cache_manager
    cache = manager.allocate_cache(DESC)
    pipe.send(cache.cache_id)
    source = pipe.recv()
    print("decoder: pushed to it   ", show(cache, 0))
    manager.pull_cache(CacheKeyByIdAndIndex(1, source, 1), cache, 1)
    print("decoder: pulled by it   ", show(cache, 1))
    pipe.send("done")
    pipe.recv()
    datadist.finalize()


def main() -> None:
    """The PROMPT."""
    ours, theirs = multiprocessing.Pipe()
    decoder = multiprocessing.get_context("spawn").Process(target=decode, args=(theirs,))
    decoder.start()
    datadist = start(LLMRole.PROMPT, 1)
    manager = datadist.cache_manager
    cache = manager.allocate_cache(DESC, [CacheKey(1, req_id=6), CacheKey(1, req_id=7)])
    target = ours.recv()
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = 2
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info(*ADDRESS)
    status, _ = datadist.link_clusters([cluster])
    print("prompt:  link           ", status.name)
    print("prompt:  layer by layer ", push_layers(manager, cache, target).name)
    for layer in range(LAYERS):
        fill(cache, layer, row=1, value=20)
    ours.send(cache.cache_id)
    ours.recv()
    datadist.unlink_clusters([cluster])
    ours.send("end")
    decoder.join()
    datadist.finalize()


if __name__ == "__main__":
    main()
