"""SGLang's own FlexKV connector on the alias: `sglang_flexkv.py`, with SGLang's Python.

Its KV pool is host memory that can be handed over. What SGLang itself does with the connector needs
CUDA's streams, so it is called as SGLang's radix cache calls it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

PAGE, PAGES, LAYERS, HEADS, SIZE = 4, 16, 3, 2, 8


def main(is_mla: bool) -> None:
    from sglang.srt.mem_cache.storage.flexkv import flexkv_comm
    from sglang.srt.mem_cache.storage.flexkv.flexkv_connector import FlexKVConnector

    from kvelastic.flexkv.common.memory_handle import shared_zeros

    # Of a server that has one rank; nothing is sent over it.
    flexkv_comm.get_parallel = lambda: SimpleNamespace(world_group=SimpleNamespace(cpu_group=None))
    heads, size = (1, 6) if is_mla else (HEADS, SIZE)
    shape = ((PAGES + 1) * PAGE, heads, size)
    kinds = ("kv_buffer",) if is_mla else ("k_buffer", "v_buffer")
    buffers = {
        kind: [torch.from_numpy(shared_zeros(shape, "float16")) for _ in range(LAYERS)]
        for kind in kinds
    }
    connector = FlexKVConnector(
        sgl_model_config=SimpleNamespace(
            num_hidden_layers=LAYERS,
            get_num_kv_heads=lambda tp_size: HEADS // tp_size,
            head_dim=SIZE,
            kv_lora_rank=4,
            qk_rope_head_dim=2,
            attention_arch=SimpleNamespace(name="MLA" if is_mla else "MHA"),
            dtype=torch.float16,
            model_path="tiny",
        ),
        server_args=SimpleNamespace(
            tp_size=1,
            dp_size=1,
            pp_size=1,
            nnodes=1,
            port=30000 + is_mla,  # the first rank looks for its server until the process ends
            device="cpu",
            kv_cache_dtype="auto",
        ),
        page_size=PAGE,
        kvcache=SimpleNamespace(**buffers),
        tp_rank=0,
        dp_rank=None,
        pp_rank=0,
        attn_cp_rank=0,
    )
    tensors = [one for kind in kinds for one in buffers[kind]]
    for at, tensor in enumerate(tensors):
        tensor[:] = torch.from_numpy(
            np.random.default_rng(at).integers(0, 1000, shape).astype("float16")
        )
    tokens = list(range(3 * PAGE + 1))
    where = pages(5, 9, 2)
    handle: Any = "request 1"
    assert connector.lookup_kv(tokens, torch.ones(len(tokens), dtype=torch.bool)) == (1, 0)
    stored = connector.store_kv(handle, tokens, torch.cat([where, torch.tensor([0])]))
    assert stored > 0
    assert connector.kv_manager.wait(stored, 60.0)[stored].status.value == "success"
    assert connector.check_completed_stores() == [handle]
    kept = [tensor[where].clone() for tensor in tensors]
    for tensor in tensors:
        tensor[:] = 0
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[:PAGE] = False
    _, found = connector.lookup_kv(tokens, mask, handle)
    assert found == 2 * PAGE
    assert connector.retrieve_kv(handle, pages(1, 16)) == 2 * PAGE
    for tensor, was in zip(tensors, kept, strict=True):
        assert (tensor[pages(1, 16)] == was[PAGE:]).all()
        assert not tensor[pages(5, 9, 2)].any()
    connector.reset()
    connector.shutdown()
    print("moved")


def pages(*numbers: int) -> torch.Tensor:
    """The slots of these pages."""
    return (torch.tensor(numbers)[:, None] * PAGE + torch.arange(PAGE)).flatten()


if __name__ == "__main__":
    main(is_mla=False)
    main(is_mla=True)
