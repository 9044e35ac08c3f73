"""What an engine calls for every request: alloc, free, available_size, publishing the usage."""

from __future__ import annotations

import os

from benchmarks.harness import Figure, compare, per_call_us

BLOCKS, TOKENS, LAYERS, CELL_BYTES = 8000, 16, 8, 512


def nothing() -> None:
    """A bare Python call: what no function can be faster than."""


def figures() -> list[Figure]:
    os.environ["KVELASTIC_HOST_MEMORY"] = "2G"
    from kvelastic.integration.vllm import interfaces
    from kvelastic.kvcached import embedded

    interfaces.init_kvelastic(device="cpu")
    manager = interfaces.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS)
    alloc, free = manager.alloc, manager.free

    def pair() -> None:
        ids = alloc(16)
        assert ids is not None
        free(ids)

    pair()
    floor = ("bare call", nothing)
    rows = [
        compare("alloc(16) then free of the 16", pair, floor=floor, bar="<= 2 us"),
        compare("available_size()", manager.available_size, floor=floor, bar="<= 0.1 us"),
    ]
    control_block = embedded.required().groups[0].pool.segment.control_block
    publish = Figure("publish usage (native)", "us", [], "<= 0.2 us", "getppid() from Python")
    for _ in range(15):
        publish.floor_samples.append(per_call_us(os.getppid, 20_000))
        publish.samples.append(control_block.measure_publish_ns(100_000) / 1000)
    rows.append(publish)
    interfaces.shutdown_kvelastic()
    return rows
