"""An engine's configuration as FlexKV's, what adapters count, and how they treat a lost server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    ConfigError,
    UnsupportedError,
)
from kvelastic.flexkv.common.request import KVResponse, KVResponseStatus
from kvelastic.flexkv.integration.config import FlexKVConfig
from kvelastic.flexkv.integration.stats import FlexKVStats
from kvelastic.flexkv.integration.utils import cdiv
from kvelastic.flexkv.integration.vllm import scheduler_side
from kvelastic.flexkv.integration.vllm.scheduler_side import FlexKVSchedulerConnector


def vllm(**more: Any) -> SimpleNamespace:
    """What is read of a VllmConfig."""
    facts = {"tp": 2, "dp": 1, "pp": 1, "mla": False, "cache_dtype": "auto", **more}
    return SimpleNamespace(
        instance_id="i7",
        model_config=SimpleNamespace(
            model="tiny",
            dtype="torch.bfloat16",
            use_mla=facts["mla"],
            get_num_layers=lambda parallel: 4,
            get_num_kv_heads=lambda parallel: 3,
            get_head_size=lambda: 64,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=facts["tp"],
            data_parallel_size=facts["dp"],
            pipeline_parallel_size=facts["pp"],
        ),
        cache_config=SimpleNamespace(block_size=32, cache_dtype=facts["cache_dtype"]),
    )


def configured(environ: dict[str, str] | None = None, **more: Any) -> FlexKVConfig:
    config = FlexKVConfig.from_env(environ or {})
    config.post_init_from_vllm_config(vllm(**more))
    return config


def test_model_shape_covers_all_ranks() -> None:
    model = configured().model_config
    assert (model.num_layers, model.num_kv_heads, model.head_size, model.kv_dim) == (4, 6, 64, 2)
    assert (model.tp_size, model.dp_size, model.dtype_name, model.model) == (
        2,
        1,
        "bfloat16",
        "tiny",
    )
    assert model.heads_per_rank == 3
    row = configured(mla=True).model_config
    assert (row.num_kv_heads, row.kv_dim) == (1, 1)
    assert configured(cache_dtype="fp8_e4m3").model_config.token_size_in_bytes == 4 * 2 * 6 * 64


def test_cache_sizes_come_from_user_settings() -> None:
    config = configured({"FLEXKV_CPU_CACHE_GB": "1", "FLEXKV_EVICTION_POLICY": "slru"})
    block_bytes = 4 * 2 * 6 * 64 * 2 * 32
    assert config.cache_config.tokens_per_block == 32
    assert config.cache_config.num_cpu_blocks == (1 << 30) // block_bytes
    assert config.cache_config.eviction_policy == "slru"
    assert not config.cache_config.enable_ssd


def test_weights_name_comes_from_user_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvelastic.logs._logged", set())
    disk = {
        "FLEXKV_CPU_CACHE_GB": "1",
        "FLEXKV_SSD_CACHE_GB": "2",
        "FLEXKV_SSD_CACHE_DIR": str(tmp_path),
    }
    named = configured({**disk, "FLEXKV_WEIGHTS": "sha256:1"}).model_config
    assert named.weights == "sha256:1"
    assert "FLEXKV_WEIGHTS" not in caplog.text
    assert not configured({"FLEXKV_CPU_CACHE_GB": "1"}).model_config.weights
    assert "FLEXKV_WEIGHTS" not in caplog.text
    assert not configured(disk).model_config.weights
    assert "FLEXKV_WEIGHTS does not name this model's weights" in caplog.text
    (tmp_path / "f.json").write_text('{"weights": "commit 7"}')
    in_file = {"FLEXKV_CONFIG_PATH": str(tmp_path / "f.json")}
    assert configured(in_file).model_config.weights == "commit 7"


def test_different_engine_layouts_share_no_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine(version: str, **more: Any) -> str:
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
        config = FlexKVConfig.from_env({})
        its = vllm()
        its.cache_config.kv_cache_layout = more.get("layout", "NHD")
        its.model_config.quantization = more.get("quantization")
        config.post_init_from_vllm_config(its)
        return config.model_config.engine

    same = [engine("0.32"), engine("0.32")]
    others = [engine("0.33"), engine("0.32", layout="HND"), engine("0.32", quantization="fp8")]
    assert len({*same, *others}) == 4


def test_endpoints_are_per_engine_unless_configured() -> None:
    own = configured()
    assert own.server_recv_port.endswith("_i7")
    assert own.gpu_register_port == own.server_recv_port + "_gpu_register"
    named = configured({"FLEXKV_SERVER_RECV_PORT": "ipc:///tmp/x"})
    assert (named.server_recv_port, named.gpu_register_port) == (
        "ipc:///tmp/x",
        "ipc:///tmp/x_gpu_register",
    )
    assert FlexKVConfig(server_recv_port="ipc:///a").gpu_register_port == "ipc:///a_gpu_register"


def test_client_ids_continue_across_instances() -> None:
    config = configured({"FLEXKV_INSTANCE_NUM": "3", "FLEXKV_INSTANCE_ID": "2"}, dp=4)
    assert config.model_config.instance_num == 3
    assert config.dp_client_id_of_instance == 8


def test_unsupported_settings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size=2"):
        configured(pp=2)
    with pytest.raises(UnsupportedError, match="enable_gds"):
        configured({"FLEXKV_ENABLE_GDS": "1"})
    with pytest.raises(ConfigError, match=r"nothing\.yml"):
        FlexKVConfig.from_env({"FLEXKV_CONFIG_PATH": str(tmp_path / "nothing.yml")})
    assert not FlexKVConfig.from_env({"ENABLE_FLEXKV": "0"}).enable_flexkv


def test_statistics_are_logged_and_reset(caplog: pytest.LogCaptureFixture) -> None:
    stats = FlexKVStats(num_log_interval_requests=2)
    stats.record_put(num_all_tokens=100, num_unmatched_tokens=50)
    stats.record_failed(1)
    stats.record_get(200, 20, 100)
    assert (stats.get_gpu_match_ratio, stats.get_flexkv_match_ratio) == (0.1, 0.5)
    assert (stats.get_put_token_ratio, stats.total_num_requests) == (2.0, 2)
    with caplog.at_level(logging.INFO, "kvelastic.flexkv"):
        stats.record_get(200, 20, 100)
    assert "Last 2 gets: 400 tokens asked for, 10.0 % found on the device, 50.0 % in tiers" in (
        caplog.text
    )
    assert stats == FlexKVStats(num_log_interval_requests=2)
    assert FlexKVStats().get_flexkv_match_ratio == 0
    assert [cdiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]


# --- vLLM's scheduler without a server that answers ---------------------------------------------


class Manager:
    """A KVManager whose server goes and comes."""

    def __init__(self) -> None:
        self.error: ChannelError | None = None
        self.asked = 0
        self.cancelled: list[int] = []
        self.statuses: dict[int, KVResponseStatus] = {}

    def reconnect(self) -> None:
        """It stays away."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            self.asked += 1
            if self.error is not None:
                raise self.error
            if name == "cancel":
                self.cancelled += arguments[0]
            if name in ("get_match", "put_match"):
                return 5, np.ones(len(arguments[0]), np.bool_)
            if name == "try_wait":
                return {one: KVResponse(self.statuses[one], one) for one in arguments[0]}
            return None

        return call


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(scheduler_side, "_AWAY_S", float("inf"))
    one: Any = FlexKVSchedulerConnector.__new__(FlexKVSchedulerConnector)
    one._block_size = 4
    one._stats = FlexKVStats()
    one._tasks = {}
    one._away_until_s = one._silent_until_s = 0.0
    one._failed_blocks, one._to_cancel = set(), set()
    one._manager = Manager()
    return one


def request(count: int = 12, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        request_id="r1",
        num_tokens=count,
        num_computed_tokens=count,
        all_token_ids=list(range(count)),
        **more,
    )


def output(**more: Any) -> SimpleNamespace:
    facts = {"finished_sending": None, "finished_recving": None, "invalid_block_ids": set(), **more}
    return SimpleNamespace(**facts)


def loading(scheduler: Any) -> None:
    assert scheduler.get_num_new_matched_tokens(request(), 0) == (12, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],))
    scheduler.update_state_after_alloc(request(), blocks, 12)
    scheduler.launch()


def test_failed_load_finishes_after_worker_reports_blocks(scheduler: Any) -> None:
    loading(scheduler)
    scheduler._manager.statuses = {5: KVResponseStatus.FAILED}
    first, second, third = output(), output(), output(invalid_block_ids={7, 8, 9})
    scheduler.update_connector_output(first)
    assert first.finished_recving == set()
    assert scheduler.take_failed_blocks() == {7, 8, 9}
    scheduler.update_connector_output(second)
    assert second.finished_recving == set()
    assert scheduler.request_finished(request(), [7, 8, 9]) == (True, None), (
        "its blocks are still in use"
    )
    scheduler.update_connector_output(third)
    assert third.finished_recving == {"r1"}
    assert scheduler.take_failed_blocks() == set(), "they are named once"


def test_missing_server_fails_loads_and_finds_nothing(scheduler: Any) -> None:
    loading(scheduler)
    scheduler._manager.error = ChannelClosedError("the server has gone")
    answer = output()
    scheduler.update_connector_output(answer)
    assert scheduler.take_failed_blocks() == {7, 8, 9}
    assert scheduler.get_num_new_matched_tokens(request(), 0) == (0, False)
    asked = scheduler._manager.asked
    assert scheduler.get_num_new_matched_tokens(request(), 0) == (0, False)
    assert scheduler._manager.asked == asked, "a server that is away is not asked each time"


def test_silent_server_keeps_the_blocks_of_its_tasks(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_side, "_ended_well", lambda request: True)
    manager = scheduler._manager
    assert scheduler.request_finished(request(13), [7, 8, 9]) == (True, None)
    scheduler.launch()
    manager.error = ChannelTimeoutError("no reply in 30 s")
    silent, again, ended = output(), output(), output()
    scheduler.update_connector_output(silent)
    assert silent.finished_sending == set(), "it may copy these blocks later"
    asked = manager.asked
    scheduler.update_connector_output(again)
    assert again.finished_sending == set()
    assert scheduler.get_num_new_matched_tokens(request(), 0) == (0, False)
    assert manager.asked == asked, "each call would delay the engine"
    manager.error, manager.statuses = None, {5: KVResponseStatus.SUCCESS}
    scheduler._silent_until_s = 0.0
    scheduler.update_connector_output(ended)
    assert ended.finished_sending == {"r1"}


def test_undelivered_cancels_are_sent_again(scheduler: Any) -> None:
    manager = scheduler._manager
    scheduler.get_num_new_matched_tokens(request(), 4)
    manager.error = ChannelTimeoutError("no reply in 30 s")
    scheduler.launch()
    manager.error = None
    scheduler.launch()
    assert manager.cancelled == [], "the server is not called again so soon"
    scheduler._away_until_s = 0.0
    scheduler.launch()
    scheduler.launch()
    assert manager.cancelled == [5]


def test_task_is_over_once_its_cancel_is_delivered(scheduler: Any) -> None:
    loading(scheduler)
    scheduler._manager.statuses = {5: KVResponseStatus.UNREADY}
    scheduler._away_until_s = float("inf")
    scheduler.update_connector_output(output())
    assert scheduler.take_failed_blocks() == set(), "its launch may still come"
    scheduler._away_until_s = 0.0
    scheduler.update_connector_output(output())
    assert scheduler._manager.cancelled == [5]
    assert scheduler.take_failed_blocks() == {7, 8, 9}


def test_unused_match_is_cancelled(scheduler: Any) -> None:
    scheduler.get_num_new_matched_tokens(request(), 4)
    asked = scheduler._manager.asked
    scheduler.launch()
    assert scheduler._manager.asked == asked + 1
    assert scheduler._tasks == {}


def test_multimodal_and_embedding_prompts_are_skipped(scheduler: Any) -> None:
    for more in ({"mm_features": [object()]}, {"prompt_embeds": object()}):
        assert scheduler.get_num_new_matched_tokens(request(**more), 0) == (0, False)
    assert scheduler._manager.asked == 0
