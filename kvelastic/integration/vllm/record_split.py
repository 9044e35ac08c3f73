"""Reads from every rank's tensors how a vLLM divides the records of its blocks among the ranks.

A tensor of a layer has the logical shape (blocks, heads, tokens, content), K and V of a token and
head being its content. Its strides say what lies side by side. A page of the pool has blocks of
each layer, and a block may be several kernel blocks. So a record's rows are the kernel blocks of
all layers, if a head's tokens lie side by side.

Engines of different tensor parallel sizes exchange blocks by this (`tiers/stores/peer/split.py`).
An unknown division is refused: it would give wrong tokens. Tensors do not show which heads a rank
has. vLLM's `QKVParallelLinear` gives it consecutive heads, and neighbouring ranks the same one.

Pure functions; imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, NoReturn

from kvelastic.errors import UnsupportedError
from kvelastic.integration.vllm.tier_namespace import layout_of
from kvelastic.tiers.stores.peer.split import Split

_PLAIN_QUANTIZATION: Final = (0, 1)
"""vLLM's `KVQuantMode`: none, and FP8 with one scale for a tensor, which is among the weights."""

_KNOWN: Final = (
    "num_kv_heads",
    "page_size_padded",
    "num_head_slots",
    "kv_quant_mode",
    "max_tp_shards",
)
"""Fields of vLLM's spec of equal layers."""


class LayerTensor(NamedTuple):
    """A layer's KV cache in one rank."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""


def layer_tensors(worker: Any) -> list[LayerTensor]:
    """Return the layers' tensors in the order of their addresses. Runs in a worker."""
    views = {view.data_ptr(): view for view in worker.model_runner.kv_caches}
    return [
        LayerTensor(
            address,
            tuple(view.shape),
            tuple(step * view.element_size() for step in view.stride()),
        )
        for address, view in sorted(views.items())
    ]


def split_of(
    vllm_config: Any,
    cache_config: Any,
    ranks: Sequence[Sequence[LayerTensor]],
    *,
    version: str,
    block_bytes: int,
    record_bytes: int,
) -> Split:
    """Return the split of an engine with these tensors, by rank.

    `block_bytes` is a block in one buffer, `record_bytes` a block on all ranks. Raises
    `UnsupportedError` with the reason why only an engine with equal ranks can read its records.
    """
    parallel = vllm_config.parallel_config
    if len(ranks) != parallel.tensor_parallel_size:
        _refuse(f"{len(ranks)} workers are not those of one pipeline stage")
    if len(cache_config.kv_cache_groups) != 1:
        _refuse(f"the cache has {len(cache_config.kv_cache_groups)} groups of layers")
    (group,) = cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    heads, part_heads = _heads(vllm_config, spec, len(ranks))
    shapes = {(tensor.shape, tensor.strides) for rank in ranks for tensor in rank}
    counts = {len(rank) for rank in ranks}
    if len(shapes) != 1 or len(counts) != 1:
        _refuse("its layers have tensors of different shapes")
    ((shape, strides),) = shapes
    (layers,) = counts
    kernel_blocks, head_bytes = _head(shape, strides, part_heads, cache_config, block_bytes)
    whole = replace(spec, num_kv_heads=heads)
    tensors = sorted(cache_config.kv_cache_tensors, key=lambda tensor: int(tensor.offset))
    names = [name for tensor in tensors for name in tensor.layers]
    split = Split(
        ranks=len(ranks),
        rows=layers * kernel_blocks,
        heads=heads,
        head_bytes=head_bytes,
        common=layout_of(vllm_config, [(names, whole)], version),
    )
    if split.record_bytes != record_bytes:
        _refuse(f"a record has {record_bytes} bytes, and its heads {split.record_bytes}")
    return split


def _heads(vllm_config: Any, spec: Any, ranks: int) -> tuple[int, int]:
    """Return the KV heads of the model, and those of one rank."""
    if not all(hasattr(spec, name) for name in _KNOWN):
        _refuse(f"a {type(spec).__name__} does not say how the heads of its layers are stored")
    part_heads = int(spec.num_kv_heads)
    if (
        spec.page_size_padded is not None
        or spec.num_head_slots is not None
        or spec.kv_quant_mode not in _PLAIN_QUANTIZATION
    ):
        _refuse("the heads of a block are packed or padded")
    # The one latent of MLA is on every rank, whatever heads the model's configuration counts.
    is_latent = spec.max_tp_shards == 1
    heads = part_heads if is_latent else vllm_config.model_config.get_total_num_kv_heads()
    if part_heads != max(1, heads // ranks):
        _refuse(f"a rank has {part_heads} KV heads of {heads} over {ranks} ranks")
    return heads, part_heads


def _head(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    part_heads: int,
    cache_config: Any,
    block_bytes: int,
) -> tuple[int, int]:
    """Return the kernel blocks of a block, and the bytes of a head in one of them."""
    if len(shape) != 4 or shape[1] != part_heads or shape[0] % cache_config.num_blocks:
        _refuse(f"the order of a tensor's dimensions {shape} is unknown")
    kernel_blocks = shape[0] // cache_config.num_blocks
    block_step, head_step, token_step, element_bytes = strides
    head_bytes = shape[2] * token_step
    if (
        token_step != shape[3] * element_bytes
        or (part_heads > 1 and head_step != head_bytes)
        or block_step != part_heads * head_bytes
        or block_step * kernel_blocks != block_bytes
    ):
        _refuse(f"the tokens of a head do not lie side by side: {shape} with strides {strides}")
    return kernel_blocks, head_bytes


def _refuse(reason: str) -> NoReturn:
    raise UnsupportedError(reason)
