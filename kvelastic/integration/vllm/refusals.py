"""Refuses unsupported vLLM settings before anything is loaded or patched.

A model that works on stock vLLM must never return wrong results on kvelastic.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Final

from kvelastic import engines
from kvelastic.integration.hooks import versions
from kvelastic.integration.hooks.probe import refuse
from kvelastic.integration.vllm.connector_settings import (
    OFFLOADING_CONNECTOR,
    OUR_MODULE,
    SEVERAL,
    TRANSFER,
    TRANSFER_MODULE,
    is_ours,
)

_BENCH: Final = "DecodeBenchConnector"
_COMPOSED: Final = frozenset({SEVERAL, OFFLOADING_CONNECTOR, _BENCH, "ExampleConnector"})
"""Connectors that access blocks by id and whose accesses are known."""

_WHOLE_RANGE: Final = (
    "it registers the whole KV cache with its transport, and pages without memory cannot be "
    "registered"
)
_NOT_COMPOSED: Final = {
    "NixlConnector": _WHOLE_RANGE,
    "MooncakeConnector": _WHOLE_RANGE,
    "MooncakeStoreConnector": _WHOLE_RANGE,
    "MoRIIOConnector": _WHOLE_RANGE,
    "SimpleCPUOffloadConnector": "it would copy one layer of the paged layout",
}
_WITH_WINDOWS: Final = frozenset(
    {"SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec"}
)
_COUNTS_IN_32_BITS: Final = frozenset({"FLEX_ATTENTION"})
"""Attention backends whose kernels use 32-bit offsets: vLLM's issue 50427."""
_MOST_IN_32_BITS: Final = 2**31 - 1
_DEVICES: Final = ("cpu", "cuda")
_UNTRIED_KV: Final = "nvfp4"
"""Start of the names of dtypes of 4-bit floats: nvfp4, nvfp4_4over6, nvfp4_ds_mla."""
_CPU_KV: Final = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
"""Others are stored in bytes, into which vLLM 0.32's CPU attention writes whole floats."""
_SNAPSHOT: Final = "vllm.snapshot.server"
"""The module that `vllm snapshot create` runs a server with (`python -m`)."""
_OFFLOADED_KINDS: Final = ("FullAttentionSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs")

_refuse: Final = partial(refuse, "kvelastic does not support these settings of vLLM:")


def refuse_configuration(vllm_config: Any) -> None:
    """Raise `UnsupportedEngineError` naming every unsupported setting of vLLM."""
    parallel = vllm_config.parallel_config
    found: list[str] = []
    # Each engine core of a dense model runs alone; only its front end knows of the others.
    if parallel.data_parallel_size != 1 and vllm_config.model_config.is_moe:
        found.append(
            f"data_parallel_size={parallel.data_parallel_size} with a mixture of experts, whose "
            "ranks step together; data parallel dense models are supported"
        )
    for connector in _connectors(vllm_config):
        found += _refused_connector(connector)
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        found.append("HiSparse, which keeps blocks in host memory")
    if _name_of_main() == _SNAPSHOT:
        found.append(
            "vllm snapshot: the memory that an ended process was granted goes to other instances, "
            "and a restored process would use it again"
        )
    device = vllm_config.device_config.device_type
    if device not in _DEVICES:
        found.append(f"the device {device!r}; supported are {' and '.join(_DEVICES)}")
    found += _refused_kv_dtype(str(vllm_config.cache_config.cache_dtype), device)
    if device != "cpu":
        found += _refused_on_gpus(vllm_config)
    _refuse(found)


def _refused_kv_dtype(kv_dtype: str, device: str) -> list[str]:
    if device == "cpu" and kv_dtype not in _CPU_KV:
        return [
            f"--kv-cache-dtype {kv_dtype} on a CPU: vLLM accepts it there without a kernel for it, "
            f"and writes beyond the blocks. Use one of {', '.join(_CPU_KV)}"
        ]
    if kv_dtype.startswith(_UNTRIED_KV):
        return [
            f"--kv-cache-dtype {kv_dtype}: kvelastic has run on no GPU that has its kernels; "
            "fp8 is supported"
        ]
    return []


def _name_of_main() -> str | None:
    """Return the name of the module that this process runs (`python -m`), if it has one."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return None if spec is None else spec.name


def _refused_on_gpus(vllm_config: Any) -> list[str]:
    parallel = vllm_config.parallel_config
    found = []
    if parallel.use_ubatching:
        found.append("micro-batches (--enable-dbo, --ubatch-size), which use several streams")
    if parallel.enable_elastic_ep:
        found.append("elastic expert parallelism, which starts workers later")
    return found


def refuse_cache_configuration(vllm_config: Any, config: Any) -> None:
    """Raise `UnsupportedEngineError` if the KV cache has unsupported layers."""
    found: list[str] = []
    offloads = not is_ours(vllm_config.kv_transfer_config) and any(
        _name(one) == OFFLOADING_CONNECTOR for one in _connectors(vllm_config)
    )
    kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
    if offloads and (len(kinds) > 1 or kinds[0] not in _OFFLOADED_KINDS):
        found.append(
            f"{OFFLOADING_CONNECTOR} with KV cache groups of the kinds {', '.join(kinds)}: it "
            "reads freed blocks of sliding windows and states without reporting which"
        )
    layers = [layer for group in config.kv_cache_groups for layer in _layers(group.kv_cache_spec)]
    found += [
        f"layers of the kind {type(layer).__name__}, which address the KV cache's memory themselves"
        for layer in layers
        if not layer.has_layer_views
    ]
    if vllm_config.device_config.device_type != "cpu" and not _masks_windows(vllm_config):
        found += [
            f"layers of the kind {type(layer).__name__} on a GPU with this vLLM and model runner: "
            "kernels read ahead into blocks that have slid out of the window and may be unmapped. "
            "vLLM 0.33 with its V2 runner does not read them; --disable-hybrid-kv-cache-manager "
            "keeps them mapped"
            for layer in layers
            if type(layer).__name__ in _WITH_WINDOWS
        ]
    if any(tensor.host_resident for tensor in config.kv_cache_tensors):
        found.append("KV cache tensors in host memory beside those on the device")
    _refuse(list(dict.fromkeys(found)))


def refuse_short_offsets(runner: Any) -> None:
    """Raise `UnsupportedEngineError` if a kernel's element offsets would overflow.

    A layer's view spans the whole address range, so it is longer than in stock vLLM. `runner` is a
    worker's model runner after it has created its views.
    """
    backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    for name in sorted(backends & _COUNTS_IN_32_BITS):
        longest = max(map(_span, runner.kv_caches), default=0)
        if longest > _MOST_IN_32_BITS:
            _refuse(
                [
                    f"{name} with a KV cache whose layer spans {longest} elements: its 32-bit "
                    f"offsets reach {_MOST_IN_32_BITS}. Choose another --attention-backend, or a "
                    "smaller --kv-cache-memory-bytes"
                ]
            )


def _span(view: Any) -> int:
    steps = zip(view.shape, view.stride(), strict=True)
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)


def _layers(spec: Any) -> list[Any]:
    """Return a group's layer specs: one, or several of the same block size."""
    several = getattr(spec, "kv_cache_specs", None)
    return list(several.values()) if several else [spec]


def _masks_windows(vllm_config: Any) -> bool:
    """Return True if block tables hold the null block for blocks that slid out of a window."""
    vllm = engines.find("vllm")
    series = engines.nearest_series(vllm.tried, versions.installed_version(vllm.name))
    return series != "0.32" and bool(vllm_config.use_v2_model_runner)


def _connectors(vllm_config: Any) -> list[Any]:
    """Return the configured connectors, including those inside a MultiConnector."""
    return _unfolded(vllm_config.kv_transfer_config)


def _unfolded(connector: Any) -> list[Any]:
    """`connector` is vLLM's configuration object, or a dictionary inside a MultiConnector."""
    if connector is None or _name(connector) is None:
        return []
    inside = _extra(connector).get("connectors", []) if _name(connector) == SEVERAL else []
    return [connector, *(each for one in inside for each in _unfolded(one))]


def _refused_connector(connector: Any) -> list[str]:
    name = str(_name(connector))
    module = _value(connector, "kv_connector_module_path")
    if (name, module) == (TRANSFER, TRANSFER_MODULE):
        return []
    if module not in (None, OUR_MODULE):
        return [f"the KV connector {name} from its own module, which kvelastic does not know"]
    if name not in _COMPOSED:
        why = _NOT_COMPOSED.get(name, "it is not tested with pages that are unmapped")
        composed = ", ".join(sorted(_COMPOSED))
        return [f"the KV connector {name}: {why} (supported: {composed})"]
    if name == _BENCH and _extra(connector).get("startup_fill"):
        return [f"{_BENCH} with startup_fill, which writes to blocks that have no memory"]
    if name == OFFLOADING_CONNECTOR and _extra(connector).get("canonical_layout"):
        return [
            f"{OFFLOADING_CONNECTOR} with canonical_layout: not tested with pages that are unmapped"
        ]
    return []


def _value(connector: Any, key: str) -> Any:
    return connector.get(key) if isinstance(connector, dict) else getattr(connector, key, None)


def _name(connector: Any) -> Any:
    return _value(connector, "kv_connector")


def _extra(connector: Any) -> dict[str, Any]:
    return _value(connector, "kv_connector_extra_config") or {}
