"""What must not be mixed is told apart: weights by their contents, and all else that changes KV."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvelastic.integration.vllm.tier_namespace import key_of, namespace_of, weight_files_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 128}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (tmp_path / "README.md").write_text("not read")
    return tmp_path


class Spec:
    block_size = 32

    def __init__(self, window: int = 0) -> None:
        self.window = window

    def __repr__(self) -> str:
        return f"Spec(window={self.window})"


def vllm_config(model: str = "/m", **changes: Any) -> SimpleNamespace:
    """A configuration of vLLM; a change is named by the part it is in, `parallel__tensor_...`."""
    parts: dict[str, dict[str, Any]] = {
        "model": {
            "model": model,
            "dtype": "torch.float32",
            "revision": None,
            "quantization": None,
            "hf_config": SimpleNamespace(rope_theta=1.0),
        },
        "load": {"load_format": "auto"},
        "parallel": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "cache": {
            "cache_dtype": "auto",
            "kv_cache_layout": "LBHNC",
            "prefix_caching_hash_algo": "sha256",
        },
        "device": {"device_type": "cpu"},
    }
    for name, value in changes.items():
        part, _, field = name.partition("__")
        parts[part][field] = value
    return SimpleNamespace(
        **{f"{part}_config": SimpleNamespace(**fields) for part, fields in parts.items()}
    )


def cache_config(window: int = 0) -> SimpleNamespace:
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=Spec(window))
    return SimpleNamespace(kv_cache_groups=[group])


def namespace(config: SimpleNamespace, **more: Any) -> Any:
    given = {
        "cache_config": cache_config(),
        "record_bytes": 4096,
        "version": "0.32.0",
        "environ": {},
        "has_files": True,
        **more,
    }
    return namespace_of(config, **given)


def test_weight_files_are_those_of_the_model(model: Path) -> None:
    files = weight_files_of(vllm_config(str(model)))
    assert files is not None
    assert list(files.files) == ["config.json", "model.safetensors"]
    assert weight_files_of(vllm_config(str(model), load__load_format="dummy")) is None
    assert weight_files_of(vllm_config("org/some-model")) is None


def test_equal_engines_share_the_namespace() -> None:
    assert namespace(vllm_config()) == namespace(vllm_config())


@pytest.mark.parametrize(
    "changes",
    [
        {"model__model": "/other"},
        {"model__dtype": "torch.bfloat16"},
        {"model__quantization": "fp8"},
        {"model__hf_config": SimpleNamespace(rope_theta=2.0)},
        {"cache__cache_dtype": "fp8"},
        {"cache__kv_cache_layout": "BLHNC"},
        {"cache__prefix_caching_hash_algo": "sha256_cbor"},
        {"parallel__tensor_parallel_size": 2},
        {"parallel__pipeline_parallel_size": 2},
        {"device__device_type": "cuda"},
    ],
)
def test_configuration_that_changes_kv_changes_the_namespace(changes: dict[str, Any]) -> None:
    other = namespace(vllm_config(**changes))
    assert other.fingerprint != namespace(vllm_config()).fingerprint


@pytest.mark.parametrize(
    "more",
    [
        {"cache_config": cache_config(window=64)},
        {"version": "0.33.0"},
        {"environ": {"PYTHONHASHSEED": "0"}},
        {"record_bytes": 8192},
    ],
)
def test_other_kv_inputs_change_the_namespace(more: dict[str, Any]) -> None:
    assert namespace(vllm_config(), **more).fingerprint != namespace(vllm_config()).fingerprint


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {"has_files": False}),
        (
            {
                "load__load_format": "dummy",
                "model__hf_config": SimpleNamespace(_commit_hash="a"),
            },
            {"has_files": False},
        ),
        ({"cache__prefix_caching_hash_algo": "xxhash"}, {}),
    ],
)
def test_unknown_weights_give_a_private_namespace(changes: Any, more: Any) -> None:
    first, second = (namespace(vllm_config(**changes), **more) for _ in range(2))
    assert first.fingerprint != second.fingerprint


def test_commit_identifies_weights_without_a_path() -> None:
    def by_commit(commit: str) -> Any:
        settings = SimpleNamespace(_commit_hash=commit)
        config = vllm_config("org/model", model__hf_config=settings)
        return namespace(config, has_files=False)

    assert by_commit("a") == by_commit("a")
    assert by_commit("a") != by_commit("b")


def test_key_depends_on_hash_and_group() -> None:
    space = namespace(vllm_config())
    hashed, other = bytes(32), bytes(31) + b"\1"
    first, second = (0).to_bytes(4, "big"), (1).to_bytes(4, "big")
    keys = {key_of(space, hashed + first), key_of(space, hashed + second)}
    assert len(keys | {key_of(space, other + first)}) == 3
    assert key_of(space, hashed + second) == space.key_of(hashed, 1)
