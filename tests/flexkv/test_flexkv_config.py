"""ModelConfig and CacheConfig: FlexKV's names and defaults, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from kvelastic.errors import ConfigError, InvalidArgumentError, UnsupportedError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig, check_supported


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


def test_a_token_has_the_bytes_of_all_layers_and_ranks() -> None:
    model = ModelConfig(num_layers=3, num_kv_heads=8, head_size=64, tp_size=4)
    assert model.token_size_in_bytes == 3 * 2 * 8 * 64 * 2
    assert (model.heads_per_rank, model.ranks_in_a_record) == (2, 4)


def test_mla_is_one_row_which_every_rank_has() -> None:
    model = ModelConfig(num_layers=2, num_kv_heads=1, head_size=576, use_mla=True, tp_size=4)
    assert (model.kv_dim, model.heads_per_rank, model.ranks_in_a_record) == (1, 1, 1)
    assert ModelConfig(kv_dim=1).use_mla is True


@pytest.mark.parametrize(
    ("dtype", "size"), [("bfloat16", 2), (np.float32, 4), (np.dtype("float16"), 2), ("fp8", 1)]
)
def test_dtypes_come_as_names_or_as_numpy_has_them(dtype: Any, size: int) -> None:
    assert ModelConfig(dtype=dtype).token_size_in_bytes == 2 * size


def test_dtypes_of_torch_are_taken() -> None:
    torch = pytest.importorskip("torch")
    model = ModelConfig(dtype=torch.bfloat16)
    assert (model.dtype_name, model.token_size_in_bytes) == ("bfloat16", 4)


def test_a_model_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ModelConfig().num_layers = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_layers": 0},
        {"head_size": -1},
        {"num_kv_heads": 3, "tp_size": 2},
        {"kv_dim": 3},
        {"dtype": "complex2"},
        {"tp_size": True},
    ],
)
def test_a_model_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        ModelConfig(**wrong)


@pytest.mark.parametrize(
    ("model", "cache", "instead"),
    [
        ({"nnodes": 2}, {}, "enable_remote"),
        ({"pp_size": 2}, {}, "KVManager of its own"),
        ({"cp_size": 2}, {}, "tensor parallelism"),
        ({}, {"enable_gds": True}, "pinned host memory"),
        ({}, {"enable_nixl": True}, "pinned host memory"),
        ({}, {"enable_p2p_cpu": True}, "mooncake:HOST:PORT"),
        ({}, {"enable_p2p_ssd": True}, "shared folder"),
        ({}, {"enable_3rd_remote": True}, "enable_remote"),
        ({}, {"use_mooncake_store_backend": True}, "mooncake:HOST:PORT"),
    ],
)
def test_what_is_not_there_is_refused_with_what_to_use_instead(
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
def test_a_cache_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CacheConfig(**wrong).check()


def test_folders_come_in_one_string_or_in_a_list() -> None:
    assert CacheConfig(ssd_cache_dir="/a; /b;").ssd_folders == ["/a", "/b"]
    assert CacheConfig(ssd_cache_dir=["/a", "/b"]).ssd_folders == ["/a", "/b"]
    assert CacheConfig().ssd_folders == []
