"""Two processes on a (simulated) GPU: `gpu_rank.py rank|manager ENDPOINT`.

The rank has an elastic range of pages on the GPU; the manager puts and gets its blocks and says by
lines what it wants done with them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from battery import Contents

from kvelastic import _vmm
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.kvmanager import KVManager
from kvelastic.flexkv.server.client import KVTPClient
from kvelastic.flexkv.transfer import shared_blocks

LAYERS, TOKENS, HEADS, SIZE = 2, 16, 4, 64
ROW = TOKENS * HEADS * SIZE * 2
PER_PAGE, PAGES = 64, 8
BLOCKS_A_PAGE = 2 * LAYERS * PER_PAGE


class Tensor:
    """A layer of the paged layout, as torch would show it: blocks, K and V, tokens, heads, size."""

    dtype = "float16"
    shape = (PAGES * BLOCKS_A_PAGE - BLOCKS_A_PAGE + PER_PAGE, 2, TOKENS, HEADS, SIZE)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return (ROW // 2, PER_PAGE * ROW // 2, HEADS * SIZE, SIZE, 1)


def block_id(page: int, at: int) -> int:
    return page * BLOCKS_A_PAGE + at


def rank(endpoint: str) -> None:
    driver = _vmm.CudaDriver("cuda")
    driver.use_streams([])
    geometry = _vmm.Geometry(
        pages=PAGES,
        extent_bytes=BLOCKS_A_PAGE * ROW,
        block_bytes=ROW,
        blocks_per_page=PER_PAGE,
        buffers_per_extent=2 * LAYERS,
    )
    memory = _vmm.Range.reserve(driver, geometry)
    contents = Contents(driver)
    client = KVTPClient(endpoint)
    layers = [Tensor(memory.address + layer * 2 * PER_PAGE * ROW) for layer in range(LAYERS)]
    client.register_range(memory, driver, layers, block_axis=0)

    def rows(block: int) -> list[int]:
        return [memory.address + (at * PER_PAGE + block) * ROW for at in range(2 * LAYERS)]

    def write(block: int, contents_of: Callable[[int], bytes]) -> None:
        for at, row in enumerate(rows(block)):
            contents.write(row, contents_of(at) * ROW)

    does: dict[str, Callable[[int], Any]] = {
        "map": lambda page: memory.map([page]),
        "unmap": lambda page: memory.unmap([page], destroy=True),
        "write": lambda block: write(block, lambda at: bytes([(block + at) % 251])),
        "clear": lambda block: write(block, lambda _: b"\0"),
        "read": lambda block: [contents.read(row, ROW) for row in rows(block)],
    }
    client.wait_until_registered()
    print("registered", flush=True)
    for line in sys.stdin:
        word, _, number = line.partition(" ")
        found = does[word](int(number))
        if word == "read":
            assert all(len(set(one)) == 1 for one in found), "a row is torn"
            print([one[0] for one in found], flush=True)
        else:
            print(driver.stats()["creates"] - driver.stats()["destroys"], flush=True)
    client.close()


def manager(endpoint: str) -> None:
    sim = ctypes.CDLL("libcuda.so.1")
    sim.kvsim_count.restype = sim.kvsim_used_bytes.restype = ctypes.c_uint64
    model = ModelConfig(num_layers=LAYERS, num_kv_heads=HEADS, head_size=SIZE, dtype="float16")
    cache = CacheConfig(tokens_per_block=TOKENS, num_cpu_blocks=64)
    with KVManager(model, cache, gpu_register_port=endpoint) as one:
        print("listening", flush=True)
        for line in sys.stdin:
            kind, prompt, *ids = line.split()
            if kind == "count":
                print(sim.kvsim_count(prompt.encode()), flush=True)
                continue
            if kind == "used":
                print(sim.kvsim_used_bytes(int(prompt)), flush=True)
                continue
            if kind == "keep":
                mock.patch.object(shared_blocks, "MOST_KEPT_BYTES", int(prompt)).start()
                print(flush=True)
                continue
            tokens = np.arange(len(ids) * TOKENS) + 1000 * int(prompt)
            task, mask = one.put_match(tokens) if kind == "put" else one.get_match(tokens)
            assert int(mask.sum()) == len(ids) * TOKENS, "not all of it is there"
            slots = np.concatenate([np.arange(TOKENS) + int(block) * TOKENS for block in ids])
            one.launch(task, slots)
            print(one.wait(task, 300)[task].status.value, flush=True)
        one.check_integrity()


if __name__ == "__main__":
    {"rank": rank, "manager": manager}[sys.argv[1]](sys.argv[2])
