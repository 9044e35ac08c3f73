"""A start of vLLM that cannot work is refused in its front end, before anything is loaded."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from segment_owner import Owner, engine_core
from waiting import DEADLINE_S

from kvelastic.errors import (
    ConfigError,
    GuaranteeError,
    SegmentExistsError,
    UnsupportedEngineError,
)
from kvelastic.integration import start_checks
from kvelastic.integration.vllm import end_with_starter, in_front_end
from kvelastic.integration.vllm import start_checks as vllm_checks
from kvelastic.integration.vllm.start_checks import check_start
from kvelastic.shared import ledger, segment

GROUP = f"kvstartchecks-{os.getpid()}"
NAME = f"kvtest_start_{os.getpid()}"


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVELASTIC_LEDGER", GROUP)
    monkeypatch.setenv("KVELASTIC_IPC_NAME", NAME)
    monkeypatch.setenv("KVELASTIC_HOST_MEMORY", "1G")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the front end has started."""
    begun: list[str] = []
    monkeypatch.setattr(
        end_with_starter, "start_engine_cores", lambda *_, **__: begun.append("core")
    )
    yield begun
    assert ledger.list_ledgers() == [], "looking has left nothing"


def configured(
    device: str = "cpu", data_parallel: int = 1, *, is_moe: bool = False, kv_dtype: str = "auto"
) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=data_parallel, use_ubatching=False, enable_elastic_ep=False
        ),
        attention_config=SimpleNamespace(hisparse_config=None, backend=None),
        cache_config=SimpleNamespace(cache_dtype=kv_dtype),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(is_moe=is_moe),
        kv_transfer_config=None,
    )


def start(vllm_config: Any, count: int = 1, first: int = 0) -> None:
    """As vLLM starts its engine cores: all by name."""

    def original(
        manager: object, local_engine_count: int, start_index: int, vllm_config: Any
    ) -> None: ...

    in_front_end.start_engine_cores(
        original, None, local_engine_count=count, start_index=first, vllm_config=vllm_config
    )


def test_valid_start_continues(started: list[str]) -> None:
    start(configured())
    start(configured(data_parallel=2), count=2)
    assert started == ["core", "core"]


def test_taken_name_is_rejected(started: list[str]) -> None:
    with Owner(NAME) as owner, pytest.raises(SegmentExistsError, match=rf"kill {owner.pid}"):
        start(configured())
    with Owner(f"{NAME}_dp1"), pytest.raises(SegmentExistsError, match=f"{NAME}_dp1"):
        start(configured(data_parallel=2), count=2)
    assert started == []


def test_device_unsuitable_for_the_engine_is_rejected(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVELASTIC_DEVICE", "cuda:7")
    with pytest.raises(ConfigError, match=r"='cuda:7' does not fit vLLM on the CPU"):
        start(configured())
    monkeypatch.setenv("KVELASTIC_DEVICE", "host")
    with pytest.raises(ConfigError, match=r"does not fit vLLM on GPUs"):
        start(configured("cuda"))
    assert started == []


def test_guarantee_that_does_not_fit_is_rejected(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVELASTIC_MIN", "2G")
    with pytest.raises(GuaranteeError, match=r"KVELASTIC_MIN=2\.00 GiB: no room .* ask for less"):
        start(configured())
    monkeypatch.setenv("KVELASTIC_MIN", "600M")
    start(configured())
    with pytest.raises(GuaranteeError, match=r"has 600\.00 MiB guaranteed"):
        start(configured(data_parallel=2), count=2)
    assert started == ["core"]


def test_unsupported_configuration_is_rejected(started: list[str]) -> None:
    with pytest.raises(UnsupportedEngineError, match="mixture of experts"):
        start(configured(data_parallel=2, is_moe=True), count=2)
    for name in ("nvfp4", "nvfp4_4over6", "nvfp4_ds_mla"):
        with pytest.raises(UnsupportedEngineError, match=f"--kv-cache-dtype {name}: "):
            start(configured("cuda", kv_dtype=name))
    for name in ("nvfp4", "int8_per_token_head"):
        with pytest.raises(UnsupportedEngineError, match=f"{name} on a CPU: .* beyond the blocks"):
            start(configured(kv_dtype=name))
    assert started == []
    start(configured(kv_dtype="fp8"))
    assert started == ["core"]


def test_server_for_a_snapshot_is_rejected(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(name="vllm.snapshot.server")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    with pytest.raises(UnsupportedEngineError, match="vllm snapshot: the memory"):
        start(configured())
    spec.name = "vllm.entrypoints.cli.main"
    start(configured())
    assert started == ["core"]


def clock(sleep: Callable[[float], object]) -> SimpleNamespace:
    return SimpleNamespace(monotonic=time.monotonic, sleep=sleep)


def test_start_waits_for_a_dying_engine_core(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_core(NAME, has_server=False) as core:
        pid = segment.inspect(NAME).header["pid"]
        with pytest.raises(SegmentExistsError, match=f"server has ended; end it .kill {pid}"):
            start_checks.check_names([NAME], ending_s=0.0)
        monkeypatch.setattr(start_checks, "time", clock(lambda _: core.finish()))
        monkeypatch.setattr(vllm_checks, "grace_s", lambda _: DEADLINE_S)
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(logging.getLogger("kvelastic"), "propagate", True)
        check_start(configured(), [0])
    assert f"Waiting for process {pid} to end: it is called {NAME}" in caplog.text


def test_start_does_not_wait_for_a_live_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(start_checks, "time", clock(fail))
    with engine_core(NAME, has_server=True) as core:
        with pytest.raises(SegmentExistsError, match="is alive"):
            start_checks.check_names([NAME], ending_s=DEADLINE_S)
        core.finish()
