"""How a vLLM divides a block among its ranks, by its tensors. Unknown divisions are refused."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvelastic.errors import UnsupportedError
from kvelastic.integration.vllm.record_split import LayerTensor, split_of

BLOCKS, TOKENS, LAYERS, CONTENT = 10, 32, 2, 64
ITEM = 4


@dataclass(frozen=True)
class Spec:
    num_kv_heads: int
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    kv_quant_mode: int = 0
    max_tp_shards: int | None = None


def tensor(address: int, heads: int, kernel_blocks: int = 1, **steps: int) -> LayerTensor:
    """A layer's tensor: blocks of heads, each with its tokens side by side."""
    tokens = TOKENS // kernel_blocks
    head = tokens * CONTENT * ITEM
    strides = {"block": heads * head, "head": head, "token": CONTENT * ITEM, "element": ITEM}
    strides |= steps
    shape = (BLOCKS * kernel_blocks, heads, tokens, CONTENT)
    return LayerTensor(address, shape, tuple(strides.values()))


def split(
    ranks: int = 2,
    heads: int = 4,
    *,
    spec: Any = None,
    tensors: list[list[LayerTensor]] | None = None,
    groups: int = 1,
    kernel_blocks: int = 1,
    workers: int | None = None,
) -> Any:
    part = max(1, heads // ranks)
    spec = Spec(part) if spec is None else spec
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])
    placed = SimpleNamespace(offset=0, layers=["a", "b"])
    cache = SimpleNamespace(
        kv_cache_groups=[group] * groups, kv_cache_tensors=[placed], num_blocks=BLOCKS
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(kv_cache_layout="LBHNC"),
    )
    if tensors is None:
        one = [tensor(at, spec.num_kv_heads, kernel_blocks) for at in range(LAYERS)]
        tensors = [one] * (workers or ranks)
    block_bytes = spec.num_kv_heads * TOKENS * CONTENT * ITEM
    return split_of(
        config,
        cache,
        tensors,
        version="0.32.0",
        block_bytes=block_bytes,
        record_bytes=ranks * LAYERS * block_bytes,
    )


def test_engines_of_other_ranks_differ_in_nothing_else() -> None:
    one, two, eight = split(1), split(2), split(8)
    assert (two.ranks, two.rows, two.heads, two.head_bytes) == (2, 2, 4, 32 * 64 * 4)
    assert one == two.over(1) == eight.over(1)
    assert eight.replicas == 2


def test_kernel_blocks_are_rows() -> None:
    found = split(kernel_blocks=4)
    assert (found.rows, found.head_bytes) == (2 * 4, 8 * 64 * 4)
    assert found.over(1) != split().over(1)


def test_latent_is_one_head_on_every_rank() -> None:
    """The model's configuration counts heads that the cache does not have."""
    latent = split(2, 16, spec=Spec(1, max_tp_shards=1))
    assert (latent.heads, latent.replicas) == (1, 2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "groups": ({"groups": 2}, "2 groups"),
    "stages": ({"workers": 4}, "pipeline stage"),
    "heads of a rank": ({"spec": Spec(4)}, "has 4 KV heads of 4 over 2 ranks"),
    "layers with specs of their own": ({"spec": SimpleNamespace(num_kv_heads=2)}, "does not say"),
    "padding": ({"spec": Spec(2, page_size_padded=1 << 20)}, "packed or padded"),
    "packing": ({"spec": Spec(2, num_head_slots=1)}, "packed or padded"),
    "scales of tokens": ({"spec": Spec(2, kv_quant_mode=2)}, "packed or padded"),
    "tokens first": (
        {"tensors": [[tensor(0, 2, head=256, token=512)] * LAYERS] * 2},
        "side by side",
    ),
    "other layers between": (
        {"tensors": [[tensor(0, 2, block=1 << 16)] * LAYERS] * 2},
        "side by side",
    ),
    "three dimensions": (
        {"tensors": [[LayerTensor(0, (BLOCKS, TOKENS, CONTENT), (8192, 256, 4))] * LAYERS] * 2},
        "dimensions",
    ),
    "layers of other sizes": (
        {"tensors": [[tensor(0, 2), tensor(1, 1)]] * 2},
        "different shapes",
    ),
    "ranks of other sizes": (
        {"tensors": [[tensor(0, 2)] * LAYERS, [tensor(0, 2)]]},
        "different shapes",
    ),
    "more bytes than heads": ({"tensors": [[tensor(0, 2)] * 1] * 2}, "a record has"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_division_is_refused(name: str) -> None:
    given, reason = REFUSED[name]
    with pytest.raises(UnsupportedError, match=reason):
        split(**given)
