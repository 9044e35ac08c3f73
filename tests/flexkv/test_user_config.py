"""FlexKV's file and variables: what is accepted, warned of, refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvelastic.errors import ConfigError, UnsupportedError
from kvelastic.flexkv.common import user_config
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.known_settings import BY_NAME, SETTINGS
from kvelastic.flexkv.common.user_config import (
    GlobalConfig,
    UserConfig,
    load_user_config,
    load_user_config_from_env,
    load_user_config_from_file,
    update_default_config_from_user_config,
)

FLEXKV_EXAMPLE = """\
cpu_cache_gb: 32
ssd_cache_gb: 1024
ssd_cache_dir: /data0/flexkv_ssd/;/data1/flexkv_ssd/
enable_gds: false
"""


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    def say(level: int, message: str) -> None:
        assert level == logging.WARNING
        said.append(message)

    monkeypatch.setattr(user_config, "log_once", say)
    return said


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["flexkv_config.yml", "flexkv_config.yaml"])
def test_flexkv_example_file_is_read(tmp_path: Path, name: str, warnings: list[str]) -> None:
    found = load_user_config_from_file(written(tmp_path, name, FLEXKV_EXAMPLE))
    assert (found.cpu_cache_gb, found.ssd_cache_gb) == (32, 1024)
    assert found.ssd_cache_dir == ["/data0/flexkv_ssd/", "/data1/flexkv_ssd/"]
    assert warnings == []


def test_json_equals_yaml(tmp_path: Path) -> None:
    example = {"cpu_cache_gb": 32, "ssd_cache_gb": 1024, "ssd_cache_dir": "/data0;/data1"}
    as_json = written(tmp_path, "c.json", json.dumps(example))
    as_yaml = written(tmp_path, "c.yml", json.dumps(example))
    assert load_user_config_from_file(as_json) == load_user_config_from_file(as_yaml)


def test_variables_equal_the_file(tmp_path: Path) -> None:
    variables = {
        "FLEXKV_CPU_CACHE_GB": "32",
        "FLEXKV_SSD_CACHE_GB": "1024",
        "FLEXKV_SSD_CACHE_DIR": "/data0/flexkv_ssd/;/data1/flexkv_ssd/",
        "FLEXKV_ENABLE_GDS": "0",
        "OTHER": "x",
    }
    from_file = load_user_config_from_file(written(tmp_path, "c.yml", FLEXKV_EXAMPLE))
    assert load_user_config_from_env(variables) == from_file


def test_empty_environment_gives_flexkv_defaults() -> None:
    found = load_user_config_from_env({})
    assert found == UserConfig(16, 0, ["./flexkv_ssd"])
    assert UserConfig().ssd_cache_dir == "./ssd_cache"


def test_file_overrides_variables(tmp_path: Path) -> None:
    path = written(tmp_path, "c.yml", "cpu_cache_gb: 2\n")
    found = load_user_config(
        {
            "FLEXKV_CONFIG_PATH": path,
            "FLEXKV_CPU_CACHE_GB": "4",
            "FLEXKV_EVICTION_POLICY": "LFU",
        }
    )
    assert found.cpu_cache_gb == 2
    assert found.settings["eviction_policy"] == "lfu"


def test_ignored_settings_give_one_warning(tmp_path: Path, warnings: list[str]) -> None:
    text = "index_accel: 1\nevict_ratio: 0.05\ntransfer_sms_h2d: 8\nredis_host: 10.0.0.1\n"
    load_user_config_from_file(written(tmp_path, "c.yml", text))
    (warning,) = warnings
    for name in ("index_accel", "evict_ratio", "transfer_num_cta_h2d", "redis_host"):
        assert f"{name} (" in warning
    assert "cpu_cache_gb" not in warning


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("cpu_cache_bg: 3\n", "cpu_cache_gb"),
        ("ssd_cache_dirs: /x\n", "ssd_cache_dir"),
        ("CPU_CACHE_GB: 3\n", "is no setting of FlexKV"),
    ],
)
def test_unknown_key_is_refused_with_a_suggestion(tmp_path: Path, text: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        load_user_config_from_file(written(tmp_path, "c.yml", text))


def test_unknown_variable_warns_with_a_suggestion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FlexKV's versions read more variables than either knows; a start does not end for one."""
    name = "FLEXKV_CPU_CACHE_SIZE_GB"
    with caplog.at_level(logging.WARNING, logger="kvelastic"):
        found = load_user_config_from_env({name: "3", "FLEXKV_CPU_CACHE_GB": "4"})
    assert found.cpu_cache_gb == 4
    assert f"{name} is no setting" in caplog.text
    assert "FLEXKV_CPU_CACHE_GB meant" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_cache_gb", 0),
        ("cpu_cache_gb", "many"),
        ("cpu_cache_gb", float("nan")),
        ("ssd_cache_gb", -1),
        ("ssd_cache_gb", 3),  # not above the CPU's 16
        ("ssd_cache_dir", ""),
        ("ssd_cache_dir", [1]),
        ("eviction_policy", "mru"),
        ("server_launch_mode", "inside"),
        ("server_client_mode", "maybe"),
        ("instance_num", 0),
        ("instance_num", True),
        ("num_log_interval_requests", 1.5),
    ],
)
def test_invalid_value_error_names_the_setting(tmp_path: Path, name: str, value: object) -> None:
    path = written(tmp_path, "c.json", json.dumps({name: value}))
    with pytest.raises(ConfigError, match=name):
        load_user_config_from_file(path)


@pytest.mark.parametrize("name", [one.name for one in SETTINGS if one.instead])
def test_unsupported_settings_are_refused_with_an_alternative(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, "c.json", json.dumps({name: 1, "cpu_cache_gb": 1}))
    with pytest.raises(UnsupportedError, match=f"{name}=True: use "):
        load_user_config_from_file(path)
    load_user_config_from_file(written(tmp_path, "d.json", json.dumps({name: 0})))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("c.toml", "x", "yaml"),
        ("c.yml", "a: [", "YAML"),
        ("c.yml", "cpu_cache_gb: 1\ncpu_cache_gb: 2\n", "twice"),
        ("c.json", '{"cpu_cache_gb": 1, "cpu_cache_gb": 2}', "twice"),
        ("c.json", "{", "JSON"),
        ("c.json", "[1]", "names"),
        ("c.yml", "1: 2", "names"),
        ("c.yml", "- 1", "names"),
        ("c.json", "[" * 50_000, "JSON"),
        ("c.yml", "{" * 1_000, "YAML"),
        ("c.yml", "#" * 70_000, "longer"),
        ("c.yml", "a: !!python/object/apply:os.system [x]", "YAML"),
    ],
)
def test_invalid_file_is_refused_with_the_reason(
    tmp_path: Path, name: str, text: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        load_user_config_from_file(written(tmp_path, name, text))


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_user_config({"FLEXKV_CONFIG_PATH": str(tmp_path / "absent.yml")})
    (tmp_path / "c.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_user_config_from_file(str(tmp_path / "c.yml"))
    assert load_user_config_from_file(written(tmp_path, "d.yml", "# nothing\n")).cpu_cache_gb == 16


def test_environment_only_settings_are_refused_in_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FLEXKV_LOG_LEVEL"):
        load_user_config_from_file(written(tmp_path, "c.yml", "log_level: debug\n"))


# --- into CacheConfig -----------------------------------------------------------------------------

MODEL = ModelConfig(num_layers=4, num_kv_heads=2, head_size=64, dtype="float16")
BLOCK_BYTES = 4 * 2 * 64 * 2 * 2 * 16


def updated(**settings: Any) -> CacheConfig:
    cache = CacheConfig()
    variables = {BY_NAME[name].variable: str(value) for name, value in settings.items()}
    update_default_config_from_user_config(MODEL, cache, load_user_config_from_env(variables))
    return cache


def test_sizes_become_whole_blocks() -> None:
    cache = updated(cpu_cache_gb=1, ssd_cache_gb=2.5, ssd_cache_dir="/a;/b")
    assert cache.num_cpu_blocks == (1 << 30) // BLOCK_BYTES
    assert cache.num_ssd_blocks == (5 << 29) // BLOCK_BYTES
    assert (cache.enable_ssd, cache.ssd_folders) == (True, ["/a", "/b"])
    assert not updated(cpu_cache_gb=1).enable_ssd
    with pytest.raises(ConfigError, match="holds no block"):
        updated(cpu_cache_gb=1e-6)


def test_other_settings_reach_the_cache_config() -> None:
    cache = updated(
        eviction_policy="slru",
        enable_trace=1,
        trace_file_path="/t",
        enable_remote=1,
        remote_cache_path="/shared",
    )
    assert (cache.eviction_policy, cache.trace_path) == ("slru", "/t")
    assert (cache.enable_remote, cache.remote_cache_path) == (True, "/shared")


def test_log_level_setting_applies_to_flexkv_logger() -> None:
    logger = logging.getLogger("kvelastic.flexkv")
    before = logger.level
    try:
        updated(log_level="WARNING")
        assert logger.level == logging.WARNING
        updated(log_level="off")
        assert not logger.isEnabledFor(logging.CRITICAL)
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize(
    "name",
    ["enable_gds", "enable_nixl", "enable_p2p_cpu", "enable_p2p_ssd", "use_mooncake_store_backend"],
)
def test_unsupported_cache_options_are_refused_from_variables(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        updated(**{name: 1})


def test_global_configuration_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_SERVER_CLIENT_MODE", "1")
    found = GlobalConfig()
    assert found.server_client_mode is True
    assert found.server_launch_mode == "embedded"
    with pytest.raises(AttributeError, match="server_launch_mode"):
        _ = found.server_launch_mod


def test_settings_are_unique_with_valid_defaults() -> None:
    names = [name for one in SETTINGS for name in (one.name, *one.legacy)]
    assert len(names) == len(set(names))
    for one in SETTINGS:
        assert one.default is None or one.read(one.default) == one.default
        assert not (one.idle and one.instead)
