"""A rank whose KV cache is elastic: pages come and go behind its tensors while it is registered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_pools import LAYOUTS, Memory
from waiting import DEADLINE_S

from kvelastic.flexkv.common import process_mappings
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.memory_handle import TensorSharedHandle
from kvelastic.flexkv.common.request import KVResponseStatus
from kvelastic.flexkv.kvmanager import KVManager
from kvelastic.flexkv.server.client import KVTPClient
from kvelastic.integration.vllm import interfaces as kvi

LAYERS, TOKENS, HEADS, SIZE, BLOCKS = 4, 16, 4, 64, 2048
MODEL = ModelConfig(num_layers=LAYERS, num_kv_heads=HEADS, head_size=SIZE, dtype="bfloat16")
CACHE = CacheConfig(tokens_per_block=TOKENS, num_cpu_blocks=256)


class Elastic:
    def __init__(self, folder: Path) -> None:
        import torch

        kvi.init_kvelastic(device="cpu")
        self.kv = kvi.alloc_kv_cache(
            (2, BLOCKS, TOKENS, HEADS, SIZE), TOKENS, torch.bfloat16, "cpu", num_layers=LAYERS
        )
        self.pool = kvi.get_kv_cache_manager(
            BLOCKS, TOKENS, cell_size=HEADS * SIZE * 2, num_layers=LAYERS
        )
        first = self.alloc(1)  # a page is there, by which the range's memory is known
        self.manager = KVManager(MODEL, CACHE, gpu_register_port=f"ipc://{folder}/r")
        self.manager.start()
        self.rank = KVTPClient(f"ipc://{folder}/r")
        self.rank.register_to_server(self.kv, block_axis=1)
        self.rank.wait_until_registered()
        self.pool.free(first)

    def close(self) -> None:
        self.rank.close()
        self.manager.shutdown()
        self.kv = []
        kvi.shutdown_kvelastic()

    def alloc(self, count: int) -> list[int]:
        ids = self.pool.alloc(count)
        assert ids is not None
        return ids

    def move(self, kind: str, prompt: Any, ids: list[int]) -> KVResponseStatus:
        match = self.manager.put_match if kind == "put" else self.manager.get_match
        task, mask = match(prompt)
        assert int(mask.sum()) == len(ids) * TOKENS
        slots = np.concatenate([np.arange(TOKENS) + one * TOKENS for one in ids])
        self.manager.launch(task, slots)
        return self.manager.wait(task, DEADLINE_S, completely=True)[task].status

    def mapped(self) -> int:
        return int(self.pool.get_mapped_memory_size())


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Elastic]:
    one = Elastic(tmp_path)
    yield one
    one.close()


@pytest.mark.slow
def test_blocks_are_loaded_onto_other_pages(elastic: Elastic) -> None:
    import torch

    count = 70  # more than a page
    prompt = np.arange(count * TOKENS)
    ids = elastic.alloc(count)
    wanted = []
    for layer in elastic.kv:
        layer[:, ids] = torch.rand((2, count, TOKENS, HEADS, SIZE)).bfloat16()
        wanted.append(layer[:, ids].clone())
    assert elastic.move("put", prompt, ids) is KVResponseStatus.SUCCESS
    elastic.pool.free(ids)
    elastic.pool.trim()
    # Others take pages first, so that what comes next lies elsewhere in the memory's file.
    between = elastic.alloc(40)
    again = elastic.alloc(count)
    for layer in elastic.kv:
        layer[:, again + between] = 0
    assert elastic.move("get", prompt, again) is KVResponseStatus.SUCCESS
    for layer, was in zip(elastic.kv, wanted, strict=True):
        assert torch.equal(layer[:, again], was)
        assert (layer[:, between] == 0).all()
    elastic.pool.free(again + between)


def test_unmapped_block_fails_only_its_own_copy(elastic: Elastic) -> None:
    ids = elastic.alloc(2)
    far = max(process_range(elastic))
    assert elastic.move("put", np.arange(3 * TOKENS), [*ids, far]) is KVResponseStatus.FAILED
    assert elastic.move("put", np.arange(2 * TOKENS) + 7, ids) is KVResponseStatus.SUCCESS
    elastic.manager.check_integrity()
    elastic.pool.free(ids)


def process_range(elastic: Elastic) -> range:
    return range(int(elastic.kv[0].shape[1]))


def test_fully_mapped_range_is_still_elastic() -> None:
    import torch

    memory = Memory(LAYOUTS["paged"], 2)
    memory.range.map([0, 1])
    flat = torch.from_dlpack(memory.range.tensor())
    handle = TensorSharedHandle(flat)
    assert handle.is_elastic
    first = handle.description.offset // process_mappings.PAGE_BYTES
    pages = range(first, first + flat.numel() // process_mappings.PAGE_BYTES)
    assert process_mappings.NOT_MAPPED not in process_mappings.locate(pages, handle.fd)
    memory.range.unmap([1])
    assert process_mappings.NOT_MAPPED in process_mappings.locate(pages, handle.fd)
    handle.close()


def test_page_locations_come_from_the_kernel(elastic: Elastic) -> None:
    handle = TensorSharedHandle(elastic.kv[0])
    assert handle.is_elastic
    first = handle.description.offset // process_mappings.PAGE_BYTES
    last = (
        handle.description.offset + handle.description.span_bytes
    ) // process_mappings.PAGE_BYTES
    offsets = process_mappings.locate(range(first, last), handle.fd)
    there = [offset for offset in offsets if offset != process_mappings.NOT_MAPPED]
    assert 0 < len(there) < len(offsets)
    assert len(set(there)) == len(there)
    handle.close()
