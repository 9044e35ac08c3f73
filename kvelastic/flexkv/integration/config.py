"""An engine's configuration as FlexKV's: what an adapter starts a KVManager with."""

from __future__ import annotations

import os
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
        )
        self.cache_config = replace(
            self.cache_config, tokens_per_block=vllm_config.cache_config.block_size
        )
        self._settle_endpoints(default_endpoint(str(vllm_config.instance_id)))
        update_default_config_from_user_config(
            self.model_config, self.cache_config, self.user_config
        )

    def _settle_endpoints(self, default: str) -> None:
        if not self.server_recv_port:
            self.server_recv_port = self.user_config.settings.get("server_recv_port") or default
        if not self.gpu_register_port and self.server_recv_port:
            self.gpu_register_port = gpu_register_endpoint(self.server_recv_port)
