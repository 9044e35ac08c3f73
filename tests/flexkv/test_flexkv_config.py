"""ModelConfig and CacheConfig: FlexKV's names and defaults, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvelastic.errors import ConfigError, InvalidArgumentError, UnsupportedError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig, check_supported
from kvelastic.flexkv.kvmanager import KVManager


def test_defaults_are_those_of_flexkv() -> None:
    cache = CacheConfig()
    assert (cache.tokens_per_block, cache.num_cpu_blocks, cache.num_ssd_blocks) == (
        16,
        1_000_000,
        10_000_000,
    )
    assert (cache.enable_cpu, cache.enable_ssd, cache.enable_gds, cache.enable_remote) == (
        True,
        False,
        False,
        False,
    )
    check_supported(ModelConfig(), cache)


def test_token_size_covers_all_layers_and_ranks() -> None:
    model = ModelConfig(num_layers=3, num_kv_heads=8, head_size=64, tp_size=4)
    assert model.token_size_in_bytes == 3 * 2 * 8 * 64 * 2
    assert (model.heads_per_rank, model.ranks_in_a_record) == (2, 4)


def test_mla_has_one_row_shared_by_ranks() -> None:
    model = ModelConfig(num_layers=2, num_kv_heads=1, head_size=576, use_mla=True, tp_size=4)
    assert (model.kv_dim, model.heads_per_rank, model.ranks_in_a_record) == (1, 1, 1)
    assert ModelConfig(kv_dim=1).use_mla is True


@pytest.mark.parametrize(
    ("dtype", "size"), [("bfloat16", 2), (np.float32, 4), (np.dtype("float16"), 2), ("fp8", 1)]
)
def test_dtypes_are_names_or_numpy_dtypes(dtype: Any, size: int) -> None:
    assert ModelConfig(dtype=dtype).token_size_in_bytes == 2 * size


def test_torch_dtypes_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    model = ModelConfig(dtype=torch.bfloat16)
    assert (model.dtype_name, model.token_size_in_bytes) == ("bfloat16", 4)


@pytest.mark.parametrize(("fourth", "kv_dim"), [(2, 2), (1, 1), (False, 2), (True, 1)], ids=str)
def test_positional_arguments_match_both_flexkv_versions(fourth: Any, kv_dim: int) -> None:
    """Its fourth field was `use_mla`, and is `kv_dim`; the fifth is the dtype in both."""
    model = ModelConfig(4, 8, 128, fourth, np.float16, 4, 2)
    assert (model.num_layers, model.num_kv_heads, model.head_size) == (4, 8, 128)
    assert (model.kv_dim, model.use_mla, model.dtype_name) == (kv_dim, kv_dim == 1, "float16")
    assert (model.tp_size, model.dp_size) == (4, 2)


def test_fields_can_be_set_one_by_one() -> None:
    model = ModelConfig()
    model.num_layers, model.head_size, model.dtype = 4, 576, np.float16
    model.tp_size = 4  # before the heads, which it divides
    model.use_mla = True
    assert (model.kv_dim, model.token_size_in_bytes) == (1, 4 * 576 * 2)
    model.kv_dim = 2
    assert model.use_mla is False
    with pytest.raises(InvalidArgumentError, match="tp_size=4"):
        check_supported(model, CacheConfig())
    assert replace(model, num_kv_heads=8).num_kv_heads == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_layers": 0},
        {"num_layers": "4"},
        {"head_size": 1.0},
        {"tp_size": True},
        {"use_mla": np.float16},
        {"use_mla": 3},
        {"kv_dim": True},
        {"dtype": 2},
        {"weights": b"w"},
        {"num_kv_head": 1},
    ],
    ids=str,
)
def test_setting_an_invalid_value_is_refused(wrong: dict[str, Any]) -> None:
    model = ModelConfig()
    for name, value in wrong.items():
        with pytest.raises(InvalidArgumentError, match=name):
            setattr(model, name, value)
    assert model == ModelConfig()


def test_manager_keeps_its_initial_configuration() -> None:
    model = ModelConfig(num_layers=2)
    manager = KVManager(model, CacheConfig())
    model.num_layers = 3
    assert manager.task_engine.model_config.num_layers == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_layers": 0},
        {"head_size": -1},
        {"num_kv_heads": 3, "tp_size": 2},
        {"kv_dim": 3},
        {"dtype": "complex2"},
        {"use_mla": np.float16},
        {"use_mla": False, "kv_dim": 1},
        {"tp_size": True},
    ],
)
def test_invalid_model_config_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        ModelConfig(**wrong)


@pytest.mark.parametrize(
    ("model", "cache", "instead"),
    [
        ({"nnodes": 2}, {}, "enable_remote"),
        ({"pp_size": 2}, {}, "its own KVManager"),
        ({"cp_size": 2}, {}, "tensor parallelism"),
        ({}, {"enable_gds": True}, "pinned host memory"),
        ({}, {"enable_nixl": True}, "pinned host memory"),
        ({}, {"enable_p2p_cpu": True}, "mooncake:HOST:PORT"),
        ({}, {"enable_p2p_ssd": True}, "shared folder"),
        ({}, {"enable_3rd_remote": True}, "enable_remote"),
        ({}, {"use_mooncake_store_backend": True}, "mooncake:HOST:PORT"),
    ],
)
def test_unsupported_options_are_refused_with_an_alternative(
    model: dict[str, Any], cache: dict[str, Any], instead: str
) -> None:
    with pytest.raises(UnsupportedError, match=instead) as refused:
        check_supported(ModelConfig(**model), CacheConfig(**cache))
    assert next(iter({**model, **cache})) in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens_per_block": 0},
        {"enable_cpu": False},
        {"enable_ssd": True},
        {"enable_remote": True},
        {"eviction_policy": "random"},
        {"num_cpu_blocks": 0},
        {"num_remote_blocks": 0},
    ],
)
def test_invalid_cache_config_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CacheConfig(**wrong).check()


def test_folders_are_a_string_or_a_list() -> None:
    assert CacheConfig(ssd_cache_dir="/a; /b;").ssd_folders == ["/a", "/b"]
    assert CacheConfig(ssd_cache_dir=["/a", "/b"]).ssd_folders == ["/a", "/b"]
    assert CacheConfig().ssd_folders == []
