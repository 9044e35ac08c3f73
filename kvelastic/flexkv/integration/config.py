"""FlexKV's configuration for an engine: the values with which an adapter starts a KVManager."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvelastic.errors import UnsupportedError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.known_settings import boolean
from kvelastic.flexkv.common.user_config import (
    UserConfig,
    load_user_config,
    update_default_config_from_user_config,
)
from kvelastic.flexkv.server.utils import default_endpoint, gpu_register_endpoint
from kvelastic.logs import log_once


@dataclass(frozen=True)
class RankInfo:
    """A rank's position in its engine, under the names that SGLang's connector reads."""

    model_config: ModelConfig
    dp_client_id: int
    tp_rank: int
    pp_rank: int = 0
    attn_cp_rank: int = 0
    node_rank: int = 0
    pp_size_per_node: int = 1

    @property
    def attn_tp_rank(self) -> int:
        """The rank's index among the ranks that share a token's heads."""
        return self.tp_rank

    tp_rank_per_node = attn_tp_rank

    @property
    def local_rank(self) -> int:
        """The index of the rank's device."""
        return self.dp_client_id * self.model_config.tp_size + self.tp_rank

    @property
    def num_layers_per_pp_stage(self) -> int:
        """All layers, because only one pipeline stage is supported."""
        return self.model_config.num_layers


@dataclass
class FlexKVConfig:
    """Call `from_env`, then `post_init_from_vllm_config`, in each process of the engine."""

    enable_flexkv: bool = True
    server_recv_port: str = ""
    """Empty: the user's setting, otherwise an endpoint of this engine."""
    gpu_register_port: str = ""
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    model_config: ModelConfig = field(default_factory=ModelConfig)
    user_config: UserConfig = field(default_factory=UserConfig)

    def __post_init__(self) -> None:
        """Set the endpoints as far as they are known."""
        self._settle_endpoints(default="")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> FlexKVConfig:
        """Read FLEXKV_CONFIG_PATH and FLEXKV_*. Raises as `load_user_config` does."""
        enabled = boolean(environ.get("ENABLE_FLEXKV", "").strip() or "1")
        return cls(enable_flexkv=enabled, user_config=load_user_config(environ))

    @property
    def dp_client_id_of_instance(self) -> int:
        """The first data-parallel client of this instance."""
        return int(self.user_config.value("instance_id")) * self.model_config.dp_size

    def post_init_from_vllm_config(self, vllm_config: Any) -> None:
        """Take the model's shape and parallel sizes from vLLM's configuration, and size the tiers.

        Raises `UnsupportedError` for unsupported features, and `ConfigError` if the tiers hold no
        block.
        """
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise UnsupportedError(
                f"pipeline_parallel_size={parallel.pipeline_parallel_size}: FlexKV's interface"
                " serves tensor and data parallelism; KVELASTIC_TIERS in vLLM serves stages"
            )
        facts = {
            "device": getattr(getattr(vllm_config, "device_config", None), "device_type", None),
            "layout": getattr(vllm_config.cache_config, "kv_cache_layout", None),
        }
        self._set_model(
            num_layers=model.get_num_layers(parallel),
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.get_head_size(),
            use_mla=model.use_mla,
            dtype=(vllm_config.cache_config.cache_dtype, model.dtype),
            tp_size=parallel.tensor_parallel_size,
            dp_size=parallel.data_parallel_size,
            model=str(model.model),
            engine=_engine_of("vllm", model, facts),
        )
        self._size_tiers(vllm_config.cache_config.block_size, str(vllm_config.instance_id))

    def post_init_from_sglang_config(
        self,
        sglang_config: Any,
        server_args: Any,
        page_size: int,
        tp_rank: int = 0,
        pp_rank: int = 0,
        dp_rank: int = 0,
        attn_cp_rank: int = 0,
    ) -> RankInfo:
        """Take the model's shape, parallel sizes and tiers from SGLang; return the rank's position.

        Raises `UnsupportedError` for unsupported features. These include a GPU, because there
        SGLang's cache memory cannot be registered.
        """
        _refuse_of_sglang(server_args)
        tp_size = int(server_args.tp_size)
        is_mla = getattr(sglang_config.attention_arch, "name", "") == "MLA"
        facts = {"page": page_size, "attention": getattr(server_args, "attention_backend", None)}
        self._set_model(
            num_layers=int(sglang_config.num_hidden_layers),
            num_kv_heads=int(sglang_config.get_num_kv_heads(tp_size)),
            head_size=(
                int(sglang_config.kv_lora_rank) + int(sglang_config.qk_rope_head_dim)
                if is_mla
                else int(sglang_config.head_dim)
            ),
            use_mla=is_mla,
            dtype=(str(server_args.kv_cache_dtype), sglang_config.dtype),
            tp_size=tp_size,
            dp_size=int(server_args.dp_size),
            model=str(sglang_config.model_path),
            engine=_engine_of("sglang", sglang_config, facts),
        )
        self._size_tiers(int(page_size), f"sglang_{server_args.port}")
        return RankInfo(self.model_config, self.dp_client_id_of_instance + dp_rank, tp_rank)

    def _set_model(
        self, *, num_kv_heads: int, tp_size: int, dtype: tuple[str, Any], **more: Any
    ) -> None:
        """Set the model. Heads are those of one rank; `dtype` is the cache's and the model's."""
        of_cache, of_model = dtype
        found = of_model if of_cache == "auto" else of_cache
        self.model_config = ModelConfig(
            # Heads over all ranks. Ranks that share a head have a copy each.
            num_kv_heads=1 if more["use_mla"] else num_kv_heads * tp_size,
            tp_size=tp_size,
            dtype=_DTYPES.get(str(found)[:4], found),
            instance_num=self.user_config.value("instance_num"),
            weights=self.user_config.value("weights"),
            **more,
        )

    def _size_tiers(self, tokens_per_block: int, engine: str) -> None:
        self.cache_config = replace(self.cache_config, tokens_per_block=tokens_per_block)
        self._settle_endpoints(default_endpoint(engine))
        update_default_config_from_user_config(
            self.model_config, self.cache_config, self.user_config
        )
        outlives = self.cache_config.enable_ssd or self.cache_config.enable_remote
        if outlives and not self.model_config.weights:
            log_once(
                logging.WARNING,
                "FLEXKV_WEIGHTS does not name this model's weights, so blocks on a disk or a remote"
                " store are not found after a restart. Set it to a text that is another one for"
                " other weights, as their SHA-256 or commit is.",
            )

    def _settle_endpoints(self, default: str) -> None:
        if not self.server_recv_port:
            self.server_recv_port = self.user_config.value("server_recv_port") or default
        if not self.gpu_register_port and self.server_recv_port:
            self.gpu_register_port = gpu_register_endpoint(self.server_recv_port)


_DTYPES: Final = {"fp8": "fp8", "fp8_": "fp8", "bf16": "bfloat16"}
"""FlexKV's names for the engines' dtypes that differ, by the first letters of the engine's name."""


def _refuse_of_sglang(server_args: Any) -> None:
    """Raise `UnsupportedError` for features of SGLang that are not supported."""
    for name, most in (("pp_size", 1), ("nnodes", 1), ("attn_cp_size", 1)):
        if getattr(server_args, name, 1) > most:
            raise UnsupportedError(
                f"{name}={getattr(server_args, name)}: FlexKV's interface serves tensor and data"
                " parallelism on one node; KVELASTIC_TIERS in SGLang serves each rank by itself"
            )
    if getattr(server_args, "enable_dp_attention", False):
        raise UnsupportedError(
            "enable_dp_attention: ranks that share some of the heads only are not served; leave it"
            " off, or use KVELASTIC_TIERS in SGLang"
        )
    if str(server_args.device) != "cpu":
        raise UnsupportedError(
            f"device={server_args.device}: SGLang's KV cache on a GPU comes from cudaMalloc, which"
            " has no file descriptor, so it cannot be registered; use KVELASTIC_TIERS"
            " (docs/sglang.md), which keeps blocks in the same tiers"
        )


def _engine_of(package: str, model: Any, facts: Mapping[str, object]) -> str:
    """Return a text of everything but weights and model shape that changes a block's bytes."""
    as_dict = getattr(getattr(model, "hf_config", None), "to_dict", None)
    all_facts = {
        **facts,
        "quantization": getattr(model, "quantization", None),
        "model": as_dict() if callable(as_dict) else None,
    }
    digest = hashlib.sha256(json.dumps(all_facts, sort_keys=True, default=str).encode())
    version = getattr(sys.modules.get(package), "__version__", "")
    return f"{package} {version} {digest.hexdigest()[:16]}"
