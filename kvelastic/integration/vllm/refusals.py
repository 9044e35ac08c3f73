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
    if parallel.data_parallel_size != 1:
        found.append(f"data_parallel_size={parallel.data_parallel_size}: 1 is covered so far")
    if vllm_config.kv_transfer_config is not None:
        found.append("a KV connector (--kv-transfer-config, --kv-offloading-size)")
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        found.append("HiSparse, which keeps blocks in host memory")
    device = vllm_config.device_config.device_type
    if device != "cpu":
        found.append(f"the device {device!r}: 'cpu' is covered so far")
    _refuse(found)


def refuse_cache_configuration(config: Any) -> None:
    """Raise `UnsupportedEngineError` if the KV cache has layers that are not covered."""
    found: list[str] = []
    for group in config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        found += [
            f"layers of the kind {type(layer).__name__}, which address the KV cache's memory "
            "themselves"
            for layer in (specs.values() if specs else [group.kv_cache_spec])
            if not layer.has_layer_views
        ]
    if any(tensor.host_resident for tensor in config.kv_cache_tensors):
        found.append("KV cache tensors in host memory beside those on the device")
    _refuse(list(dict.fromkeys(found)))


def _refuse(found: list[str]) -> None:
    if not found:
        return
    raise UnsupportedEngineError(
        "kvelastic does not cover what this vLLM was started with:\n"
        + "\n".join(f"  - {line}" for line in found)
        + f"\n{_WAY_OUT}"
    )
