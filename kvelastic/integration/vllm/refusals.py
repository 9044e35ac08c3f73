"""What the vLLM integration does not cover yet, refused before anything is loaded or patched over.

A model that would run on stock vLLM must never run on kvelastic with wrong answers instead.
"""

from __future__ import annotations

from typing import Any

from kvelastic.errors import UnsupportedEngineError

_WAY_OUT = "Unset ENABLE_KVELASTIC to run this without kvelastic."


def refuse_configuration(vllm_config: Any) -> None:
    """Raise `UnsupportedEngineError` naming every setting of vLLM that is not covered."""
    parallel = vllm_config.parallel_config
    found: list[str] = []
    if parallel.world_size != 1:
        found.append(
            f"{parallel.world_size} workers (tensor_parallel_size="
            f"{parallel.tensor_parallel_size}, pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size}): one worker is covered so far"
        )
    if parallel.data_parallel_size != 1:
        found.append(f"data_parallel_size={parallel.data_parallel_size}: 1 is covered so far")
    if vllm_config.scheduler_config.async_scheduling:
        found.append("async scheduling: start vLLM with --no-async-scheduling")
    if vllm_config.speculative_config is not None:
        found.append("speculative decoding")
    if vllm_config.kv_transfer_config is not None:
        found.append("a KV connector (--kv-transfer-config, --kv-offloading-size)")
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        found.append("HiSparse, which keeps blocks in host memory")
    device = vllm_config.device_config.device_type
    if device != "cpu":
        found.append(f"the device {device!r}: 'cpu' is covered so far")
    _refuse(found)


def refuse_cache_configuration(config: Any) -> None:
    """Raise `UnsupportedEngineError` if the KV cache that vLLM laid out is none that is covered."""
    from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

    if len(config.kv_cache_groups) != 1:
        kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
        _refuse([f"a model with {len(kinds)} KV cache groups ({', '.join(kinds)}): a hybrid model"])
    spec = config.kv_cache_groups[0].kv_cache_spec
    uniform = isinstance(spec, UniformTypeKVCacheSpecs)
    found: list[str] = []
    for layer in spec.kv_cache_specs.values() if uniform else [spec]:
        name = type(layer).__name__
        if not isinstance(layer, AttentionSpec):
            found.append(f"layers of the kind {name}: only attention has blocks of KV")
        elif not layer.has_layer_views:
            found.append(f"layers of the kind {name}, which address their cache themselves")
    strides = {tensor.block_stride for tensor in config.kv_cache_tensors}
    if len(strides) != 1:
        found.append(f"layers whose blocks differ in size ({sorted(strides)} bytes)")
    for tensor in config.kv_cache_tensors:
        if tensor.host_resident:
            found.append("KV cache tensors in host memory")
        elif tensor.layer_stride != tensor.block_stride * config.num_blocks:
            found.append(
                f"the layout {config.kv_cache_layout}, in which the blocks of a layer do not lie "
                "side by side: set VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
    if config.needs_kv_cache_zeroing:
        found.append("a cache that vLLM zeroes block by block (mixed precision)")
    _refuse(list(dict.fromkeys(found)))


def _refuse(found: list[str]) -> None:
    if not found:
        return
    raise UnsupportedEngineError(
        "kvelastic does not cover what this vLLM was started with:\n"
        + "\n".join(f"  - {line}" for line in found)
        + f"\n{_WAY_OUT}"
    )
