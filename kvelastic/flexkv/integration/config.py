"""An engine's configuration as FlexKV's: what an adapter starts a KVManager with."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvelastic.errors import UnsupportedError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.setting_values import boolean
from kvelastic.flexkv.common.user_config import (
    UserConfig,
    load_user_config,
    update_default_config_from_user_config,
)
from kvelastic.flexkv.server.utils import default_endpoint, gpu_register_endpoint
from kvelastic.logs import say_once


@dataclass
class FlexKVConfig:
    """All of it: `from_env`, then `post_init_from_vllm_config`, in each process of the engine."""

    enable_flexkv: bool = True
    server_recv_port: str = ""
    """Empty: the user's setting, else one that belongs to this engine."""
    gpu_register_port: str = ""
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    model_config: ModelConfig = field(default_factory=ModelConfig)
    user_config: UserConfig = field(default_factory=UserConfig)

    def __post_init__(self) -> None:
        """Settle the endpoints as far as they are known."""
        self._settle_endpoints(default="")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> FlexKVConfig:
        """FLEXKV_CONFIG_PATH and FLEXKV_*. Raises as `load_user_config` does."""
        enabled = boolean(environ.get("ENABLE_FLEXKV", "").strip() or "1")
        return cls(enable_flexkv=enabled, user_config=load_user_config(environ))

    @property
    def dp_client_id_of_instance(self) -> int:
        """The first data-parallel client of this instance."""
        return int(self.user_config.settings.get("instance_id", 0)) * self.model_config.dp_size

    def post_init_from_vllm_config(self, vllm_config: Any) -> None:
        """Take the model's shape and parallel sizes from vLLM's configuration, and size the tiers.

        Raises `UnsupportedError` for what is not served, `ConfigError` for sizes that hold nothing.
        """
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise UnsupportedError(
                f"pipeline_parallel_size={parallel.pipeline_parallel_size}: FlexKV's interface"
                " serves tensor and data parallelism; KVELASTIC_TIERS in vLLM serves stages"
            )
        cache_dtype = vllm_config.cache_config.cache_dtype
        dtype = model.dtype if cache_dtype == "auto" else cache_dtype
        self.model_config = ModelConfig(
            num_layers=model.get_num_layers(parallel),
            # Of all ranks; those that have the same head have a copy each.
            num_kv_heads=(
                1
                if model.use_mla
                else model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
            ),
            head_size=model.get_head_size(),
            use_mla=model.use_mla,
            dtype="fp8" if str(dtype).startswith("fp8") else dtype,
            tp_size=parallel.tensor_parallel_size,
            dp_size=parallel.data_parallel_size,
            instance_num=self.user_config.settings.get("instance_num", 1),
            model=str(model.model),
            weights=self.user_config.settings.get("weights", ""),
            engine=_vllm_of(vllm_config),
        )
        self.cache_config = replace(
            self.cache_config, tokens_per_block=vllm_config.cache_config.block_size
        )
        self._settle_endpoints(default_endpoint(str(vllm_config.instance_id)))
        self._size_tiers()

    def _size_tiers(self) -> None:
        update_default_config_from_user_config(
            self.model_config, self.cache_config, self.user_config
        )
        outlives = self.cache_config.enable_ssd or self.cache_config.enable_remote
        if outlives and not self.model_config.weights:
            say_once(
                logging.WARNING,
                "FLEXKV_WEIGHTS does not name this model's weights, so blocks on a disk or a remote"
                " store are not found after a restart. Set it to a text that is another one for"
                " other weights, as their SHA-256 or commit is.",
            )

    def _settle_endpoints(self, default: str) -> None:
        if not self.server_recv_port:
            self.server_recv_port = self.user_config.settings.get("server_recv_port") or default
        if not self.gpu_register_port and self.server_recv_port:
            self.gpu_register_port = gpu_register_endpoint(self.server_recv_port)


def _vllm_of(vllm_config: Any) -> str:
    """What of a vLLM changes the bytes of a block, besides the weights and the model's shape."""
    model = vllm_config.model_config
    as_dict = getattr(getattr(model, "hf_config", None), "to_dict", None)
    facts = {
        "device": getattr(getattr(vllm_config, "device_config", None), "device_type", None),
        "layout": getattr(vllm_config.cache_config, "kv_cache_layout", None),
        "quantization": getattr(model, "quantization", None),
        "model": as_dict() if callable(as_dict) else None,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    version = getattr(sys.modules.get("vllm"), "__version__", "")
    return f"vLLM {version} {digest.hexdigest()[:16]}"
