"""vLLM on GPUs, what can be said without an engine: sums, refusals, and the table in the docs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvelastic import config
from kvelastic.device import tested_gpus
from kvelastic.errors import ConfigError, UnsupportedEngineError
from kvelastic.integration.hooks import versions
from kvelastic.integration.vllm import scheduler_side, start_checks, start_reserve
from kvelastic.integration.vllm.own_memory import Seen, own_bytes
from kvelastic.integration.vllm.refusals import (
    refuse_cache_configuration,
    refuse_short_offsets,
)
from kvelastic.integration.vllm.worker_device import DeviceFacts
from kvelastic.pool.layout import PageLayout

GIB = 1 << 30
BESIDE = 128 << 20
FIRST = Seen(used=30 * GIB, reserved_by_torch=0, of_instances=20 * GIB)


@pytest.mark.parametrize(
    ("now", "own"),
    [
        (FIRST, 0),
        # This process: 16 GiB by torch, 128 MiB beside it.
        (Seen(46 * GIB + BESIDE, 16 * GIB, 20 * GIB), 16 * GIB + BESIDE),
        # A neighbour of the ledger has grown by 10 GiB meanwhile, or has given back 15.
        (Seen(56 * GIB + BESIDE, 16 * GIB, 30 * GIB), 16 * GIB + BESIDE),
        (Seen(31 * GIB + BESIDE, 16 * GIB, 5 * GIB), 16 * GIB + BESIDE),
        # Another program has ended: nothing says so, and torch's figure stands.
        (Seen(36 * GIB, 16 * GIB, 20 * GIB), 16 * GIB),
    ],
)
def test_own_usage_excludes_neighbours(now: Seen, own: int) -> None:
    assert own_bytes(FIRST, now) == own


def test_neighbour_loading_its_reserve_is_not_counted() -> None:
    first = Seen(used=2 * GIB, reserved_by_torch=0, of_instances=18 * GIB)
    loaded = Seen(used=(2 + 16 + 16) * GIB, reserved_by_torch=16 * GIB, of_instances=18 * GIB)
    assert own_bytes(first, loaded) == 16 * GIB


def test_expected_start_reserve() -> None:
    assert start_reserve.expected_bytes(16 * GIB, 1, 80 * GIB) == 18 * GIB
    assert start_reserve.expected_bytes(16 * GIB, 4, 80 * GIB) == 6 * GIB
    assert start_reserve.expected_bytes(0, 1, GIB) == GIB // 32
    assert start_reserve.expected_bytes(900 * GIB, 1, 80 * GIB) == 80 * GIB
    assert start_reserve.expected_bytes(32 * GIB, 2, 80 * GIB, 15 * GIB) == 3 * GIB
    assert start_reserve.expected_bytes(16 * GIB, 1, 80 * GIB, 17 * GIB) == 2 * GIB


def test_weights_size_is_the_sum_of_files(tmp_path: Path) -> None:
    assert start_reserve.weights_bytes(str(tmp_path)) == 0
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(100))
    assert start_reserve.weights_bytes(str(tmp_path)) == 100
    (tmp_path / "model-1.safetensors").write_bytes(bytes(40))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(2))
    assert start_reserve.weights_bytes(str(tmp_path)) == 42


@pytest.mark.parametrize("model", ["somebody/no-such-model", "not a name", ""])
def test_model_without_local_files_has_size_zero(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    assert start_reserve.weights_bytes(model) == 0


class View:
    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.shape, self._strides = shape, strides

    def stride(self) -> tuple[int, ...]:
        return self._strides


def runner(backend: str, blocks: int) -> SimpleNamespace:
    group = SimpleNamespace(backend=SimpleNamespace(get_name=lambda: backend))
    return SimpleNamespace(attn_groups=[[group]], kv_caches=[View((blocks, 1024), (1024, 1))])


def test_kernel_with_32_bit_offsets_limits_the_cache() -> None:
    fits = 2**31 // 1024 - 1
    refuse_short_offsets(runner("FLEX_ATTENTION", fits))
    refuse_short_offsets(runner("FLASH_ATTN", 100 * fits))
    with pytest.raises(UnsupportedEngineError, match=r"FLEX_ATTENTION .* 32-bit"):
        refuse_short_offsets(runner("FLEX_ATTENTION", fits + 2))


class SlidingWindowSpec:
    has_layer_views = True


def cache_with_windows(device: str, v2: bool) -> tuple[SimpleNamespace, SimpleNamespace]:
    engine = SimpleNamespace(
        kv_transfer_config=None,
        device_config=SimpleNamespace(device_type=device),
        use_v2_model_runner=v2,
    )
    group = SimpleNamespace(kv_cache_spec=SlidingWindowSpec())
    return engine, SimpleNamespace(kv_cache_groups=[group], kv_cache_tensors=[])


@pytest.mark.parametrize(("version", "v2"), [("0.32.0", True), ("0.33.0", False)])
def test_sliding_windows_on_affected_gpu_versions_are_rejected(
    version: str, v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda _: version)
    refuse_cache_configuration(*cache_with_windows("cpu", v2))
    with pytest.raises(UnsupportedEngineError, match="slid out of the window"):
        refuse_cache_configuration(*cache_with_windows("cuda", v2))
    monkeypatch.setattr(versions, "installed_version", lambda _: "0.33.0")
    refuse_cache_configuration(*cache_with_windows("cuda", True))


def test_block_ids_must_fit_32_bits() -> None:
    layout = PageLayout.solve(4096, 2, page_size_bytes=2 << 20)
    pages = 2**31 // (layout.id_span(2) - layout.id_span(1))
    scheduler_side._check_ids(layout, pages - 1)
    with pytest.raises(UnsupportedEngineError, match="32 bits"):
        scheduler_side._check_ids(layout, pages + 1)


GPU = DeviceFacts("GPU-1", 80 * GIB, "NVIDIA H100")


def test_gpu_capacity_is_the_configured_share() -> None:
    other = DeviceFacts("GPU-2", 40 * GIB, "NVIDIA A100")
    places = scheduler_side._rank_devices(config.Config(gpu_utilization=0.5), [GPU, other, GPU])
    assert [(place.name, place.capacity_bytes) for place in places] == [
        ("GPU-1", 40 * GIB),
        ("GPU-2", 20 * GIB),
        ("GPU-1", 40 * GIB),
    ]
    assert not any(place.is_host for place in places)


@pytest.mark.parametrize(
    ("device", "facts"),
    [("host", GPU), ("cuda", DeviceFacts("host")), ("cuda:1", DeviceFacts("host"))],
)
def test_device_unsuitable_for_vllm_is_rejected(device: str, facts: DeviceFacts) -> None:
    with pytest.raises(ConfigError, match=f"KVELASTIC_DEVICE='{device}'"):
        scheduler_side._rank_devices(config.Config(device=device), [facts])


def test_documentation_has_the_table_of_tested_gpus() -> None:
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    assert tested_gpus.markdown() in text
    assert not tested_gpus.has_run("the simulated driver")


def test_log_lists_kernels_that_ran_on_the_gpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    h100 = replace(GPU, name="GPU-2", model="NVIDIA H100 80GB HBM3")
    with caplog.at_level("INFO", "kvelastic"):
        scheduler_side._rank_devices(config.Config(), [h100, GPU])
    seen, unseen = (record.getMessage() for record in caplog.records)
    assert "vLLM's Triton kernels, V2 runner (driver 580.159.04)" in seen
    assert "Not run on any GPU yet: FlashAttention, tensor parallel, SGLang." in seen
    assert "No GPU of this model is in the table" in unseen


@pytest.mark.parametrize(
    ("named", "index", "name"),
    [(None, 0, None), (None, 1, None), ("a", 0, "a"), ("a", 1, "a_dp1"), ("a", 12, "a_dp12")],
)
def test_data_parallel_ranks_have_their_own_names(
    named: str | None, index: int, name: str | None
) -> None:
    settings = config.load({"KVELASTIC_IPC_NAME": named} if named else {})
    assert start_checks.instance_name(settings, index) == name
