"""SGLang 0.5.23's FlexKV connector on the alias, and what of SGLang is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import pytest
from processes import PROGRAMS, run_python

from kvelastic.errors import InvalidArgumentError, UnsupportedError
from kvelastic.flexkv.common.config import ModelConfig
from kvelastic.flexkv.common.storage import KVCacheLayout, KVCacheLayoutType
from kvelastic.flexkv.integration.config import FlexKVConfig, RankInfo
from kvelastic.flexkv.server.client import KVTPClient
from kvelastic.flexkv.transfer.layerwise import build_layerwise_eventfd_socket_path
from kvelastic.flexkv.transfer_manager import TransferManagerOnRemote


@needs.sglang
@pytest.mark.engine
def test_sglang_connector_stores_and_loads_host_pages(tmp_path: Path) -> None:
    ran = run_python(
        PROGRAMS / "sglang_flexkv.py",
        python=needs.SGLANG_PYTHON,
        environment={"KVELASTIC_FLEXKV_ALIAS": "true", "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert ran.stdout.strip().splitlines()[-2:] == ["moved", "moved"]


def configured(
    environ: dict[str, str] | None = None, *, tp_rank: int = 0, dp_rank: int = 0, **more: Any
) -> tuple[FlexKVConfig, RankInfo]:
    config = FlexKVConfig.from_env(environ or {})
    model = {"arch": "MHA", "dtype": "torch.bfloat16", **more}
    server = {"tp_size": 2, "dp_size": 1, "port": 7, "device": "cpu", "kv_cache_dtype": "auto"}
    rank = config.post_init_from_sglang_config(
        SimpleNamespace(
            num_hidden_layers=3,
            get_num_kv_heads=lambda tp_size: 4 // tp_size,
            head_dim=8,
            kv_lora_rank=4,
            qk_rope_head_dim=2,
            attention_arch=SimpleNamespace(name=model["arch"]),
            dtype=model["dtype"],
            model_path="tiny",
        ),
        SimpleNamespace(**{**server, **more}),
        page_size=32,
        tp_rank=tp_rank,
        dp_rank=dp_rank,
    )
    return config, rank


def test_model_shape_covers_all_ranks() -> None:
    config, rank = configured({"FLEXKV_WEIGHTS": "w"}, tp_rank=1)
    model = config.model_config
    assert (model.num_layers, model.num_kv_heads, model.head_size, model.kv_dim) == (3, 4, 8, 2)
    assert (model.dtype_name, model.model, model.weights) == ("bfloat16", "tiny", "w")
    assert config.cache_config.tokens_per_block == 32
    assert config.server_recv_port.endswith("_sglang_7")
    assert (rank.dp_client_id, rank.attn_tp_rank, rank.num_layers_per_pp_stage) == (0, 1, 3)
    row = configured(arch="MLA", kv_cache_dtype="fp8_e4m3")[0].model_config
    assert (row.num_kv_heads, row.head_size, row.kv_dim, row.dtype_name) == (1, 6, 1, "fp8")


def test_client_ids_continue_across_instances() -> None:
    instance = {"FLEXKV_INSTANCE_NUM": "3", "FLEXKV_INSTANCE_ID": "2"}
    _, rank = configured(instance, dp_size=4, dp_rank=1, tp_rank=1)
    assert (rank.dp_client_id, rank.local_rank % 2) == (9, 1)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"device": "cuda"}, "KVELASTIC_TIERS"),
        ({"pp_size": 2}, "pp_size=2"),
        ({"nnodes": 2}, "nnodes=2"),
        ({"attn_cp_size": 2}, "attn_cp_size=2"),
        ({"enable_dp_attention": True}, "enable_dp_attention"),
    ],
)
def test_unsupported_settings_are_refused_by_name(more: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        configured(**more)


def test_layerwise_and_multi_node_parts_are_refused(tmp_path: Path) -> None:
    assert build_layerwise_eventfd_socket_path(3, 0, ModelConfig()).endswith("_eventfd.sock")
    two = ModelConfig(dp_size=2)
    assert build_layerwise_eventfd_socket_path(1, 0, two).endswith("_eventfd_dp1.sock")
    with pytest.raises(UnsupportedError, match="several machines"):
        TransferManagerOnRemote.create_process(master_host="h", master_ports=())
    with pytest.raises(UnsupportedError, match="indexer_buffers"):
        KVTPClient(f"ipc://{tmp_path}/r").register_to_server([object()], None, [object()])


def test_layout_accepts_is_mla_and_kv_dim() -> None:
    first = (KVCacheLayoutType.LAYERFIRST, 2, 16, 4, 8, 16)
    assert KVCacheLayout(*first, is_mla=True).kv_dim == 1
    assert KVCacheLayout(*first, is_mla=False).kv_dim == 2
    assert KVCacheLayout(*first, True).kv_dim == 1
    assert KVCacheLayout(*first, False).kv_dim == 2
    assert KVCacheLayout(*first).kv_dim == 2
    assert vars(KVCacheLayout(*first, 1))["is_mla"] is True
    rank = KVCacheLayout(*first, is_mla=True).div_head(4)
    assert (rank.num_head, rank.kv_dim, vars(rank)["is_mla"]) == (2, 1, True)
    assert KVCacheLayout(*first, 2) == KVCacheLayout(*first, is_mla=False)
    with pytest.raises(InvalidArgumentError, match="2 heads"):
        rank.div_head(3)
