"""Options: what an attribute takes, what it becomes, and what `init` reads of it."""

from __future__ import annotations

import json

import pytest
from msgspec import UNSET

from kvelastic.datadist import LLMConfig, LLMRole
from kvelastic.datadist.memory_config import (
    BufferTier,
    MemPool,
    alignment_of,
    parse_buffer_tiers,
    parse_mem_pool,
)
from kvelastic.datadist.options import read_options
from kvelastic.datadist.status import LLMParamError

POOL = '{"memory_size": 1048576, "page_shift": 12}'
TIERS = '{"buf_cfg": [{"total_size": 2097152, "blk_size": 256, "max_buf_size": 4096}]}'

# attribute, accepted values and their text, values of a wrong type, wrong values
ATTRIBUTES = [
    ("device_id", "ge.exec.deviceId", [(0, "0"), ([0, 1], "0;1"), ((2,), "2")],
     ["0", None, 1.0, True, [1.0]], [-1, [], [1, 1], 1 << 16]),
    ("listen_ip_info", "llm.listenIpInfo",
     [("127.0.0.1:26000", "127.0.0.1:26000"), ("1.1.1.1:1;1.1.1.2:2", "1.1.1.1:1;1.1.1.2:2"),
      ("[::1]:26000", "[::1]:26000")],
     [26000, None], ["127.0.0.1", "host:1", "1.1.1.1:70000", "1.1.1.1:x", "1.1.1.1:1;"]),
    ("sync_kv_timeout", "llm.SyncKvCacheWaitTime", [(1000, "1000"), ("20000", "20000")],
     [1.5, None, True], [0, -1, "x", "", 1 << 31]),
    ("enable_switch_role", "llm.EnableSwitchRole", [(True, "1"), (False, "0")], [1, "1", None], []),
    ("mem_utilization", "llm.MemoryUtilization", [(0.95, "0.95"), (1, "1.0")], ["0.9", None, True],
     [0, 1.01, -0.5, float("nan")]),
    ("buf_pool_cfg", "llm.BufPoolCfg", [(TIERS, TIERS)], [1, None],
     ["{}", "[1]", '{"buf_cfg": []}', '{"buf_cfg": [1]}', TIERS.replace("256", "255"),
      TIERS.replace("2097152", "2097153"), TIERS.replace("4096", "2097152"),
      '{"buf_cfg": [{"blk_size": 1}]}', TIERS.replace("blk_size", "block")]),
    ("mem_pool_cfg", "llm.MemPoolConfig", [(POOL, POOL), ('{"memory_size": 1}',) * 2], [1, {}],
     ["{", "[]", "{}", POOL.replace("12", "9"), POOL.replace("12", "31"),
      '{"memory_size": 0}', '{"memory_size": 1, "more": 1}', "[" * 100000]),
    ("host_mem_pool_cfg", "llm.HostMemPoolConfig", [(POOL, POOL)], [None],
     [f'{{"memory_size": {(20 << 30) + 1}}}']),
    ("enable_cache_manager", "llm.EnableCacheManager", [(True, "1")], [0, None], []),
    ("enable_remote_cache_accessible", "llm.EnableRemoteCacheAccessible", [(False, "0")], [0], []),
    ("rdma_traffic_class", "llm.RdmaTrafficClass", [(132, "132"), (0, "0")], ["132"], [-4, 256, 3]),
    ("rdma_service_level", "llm.RdmaServiceLevel", [(4, "4")], ["4"], [-1, 8]),
    ("local_comm_res", "llm.LocalCommRes", [("", ""), ('{"version": "1.3"}',) * 2], [1, {}],
     ["x", "[]"]),
    ("link_total_time", "llm.LinkTotalTime", [(0, "0"), (20, "20")], ["1"], [-1, 1 << 32]),
    ("link_retry_count", "llm.LinkRetryCount", [(2, "2")], ["1"], [0, 101]),
    ("transfer_backend", "llm.TransferBackend", [("hixl", "hixl")], [1], ["hccl"]),
    ("global_resource_config", "llm.GlobalResourceConfig", [("{}", "{}")], [1], ["x"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key", "good", "types", "values"), ATTRIBUTES, ids=[row[0] for row in ATTRIBUTES]
)
def test_attribute_becomes_an_option(name, key, good, types, values):
    for value, text in good:
        config = LLMConfig()
        assert config.generate_options() == {}
        setattr(config, name, value)
        assert config.generate_options() == {key: text}
    config = LLMConfig()
    for value in types:
        with pytest.raises(TypeError):
            setattr(config, name, value)
    for value in values:
        with pytest.raises(LLMParamError):
            setattr(config, name, value)
    assert config.generate_options() == {}


def test_ge_options_are_passed_unchanged():
    config = LLMConfig()
    config.device_id = 0
    config.ge_options = {"ge.flowGraphMemMaxSize": "4106127360", "ge.exec.deviceId": "1"}
    assert config.generate_options() == {
        "ge.exec.deviceId": "0",  # an attribute wins
        "ge.flowGraphMemMaxSize": "4106127360",
    }
    for wrong in (["x"], {"a": 1}, {1: "a"}):
        with pytest.raises(TypeError):
            config.ge_options = wrong
    other = LLMConfig()
    other.ge_options["ge.flowGraphMemMaxSize"] = "1"
    assert other.generate_options() == {"ge.flowGraphMemMaxSize": "1"}
    assert LLMConfig().generate_options() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("listen_ip_info", "127.0.0.1:1"),
        ("buf_pool_cfg", '{"buf_cfg": [{"total_size": 2097152, "blk_size": 256}]}'),
        ("mem_pool_cfg", '{"memory_size": 1}'),
        ("host_mem_pool_cfg", '{"memory_size": 1}'),
        ("transfer_backend", "hixl"),
    ],
)
def test_empty_value_resets_an_attribute(name, value):
    config = LLMConfig()
    setattr(config, name, value)
    assert config.generate_options()
    setattr(config, name, "")
    assert getattr(config, name) == ""
    assert config.generate_options() == {}


def options(**attributes: object) -> dict[str, str]:
    config = LLMConfig()
    for name, value in ({"device_id": 0} | attributes).items():
        setattr(config, name, value)
    return config.generate_options()


def test_options_default_to_the_first_generation():
    read = read_options(options(ge_options={"ge.flowGraphMemMaxSize": "1000"}), LLMRole.DECODER)
    assert not read.is_cache_manager
    assert read.device_pool == MemPool(950)
    assert read.host_pool is None
    assert read.sync_kv_timeout_s == 1
    assert read_options(options(), LLMRole.DECODER).device_pool == MemPool(UNSET)
    half = options(mem_utilization=0.5, ge_options={"ge.flowGraphMemMaxSize": "1000"})
    assert read_options(half, LLMRole.DECODER).device_pool == MemPool(500)
    assert read_options(options(device_id=[0, 3]), LLMRole.DECODER).device_ids == (0, 3)
    with pytest.raises(LLMParamError, match="listen_ip_info"):
        read_options(options(), LLMRole.PROMPT)
    two = options(listen_ip_info="127.0.0.1:1;127.0.0.2:2")
    assert read_options(two, LLMRole.PROMPT).listen == (("127.0.0.1", 1), ("127.0.0.2", 2))


def test_the_second_generation():
    read = read_options(options(enable_cache_manager=True), LLMRole.PROMPT)
    assert read.is_cache_manager
    assert not read.remembers_remote_caches
    assert read.device_pool is None
    read = read_options(options(local_comm_res=""), LLMRole.PROMPT)
    assert read.is_cache_manager
    assert read.remembers_remote_caches
    assert (read.link_total_s, read.link_rounds) == (120, 1)
    pools = options(enable_cache_manager=True, mem_pool_cfg=POOL, host_mem_pool_cfg=POOL)
    assert read_options(pools, LLMRole.MIX).device_pool == MemPool(1 << 20, 12)
    assert read_options(pools, LLMRole.MIX).host_pool == MemPool(1 << 20, 12)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"ge.exec.deviceId": ""},
        {"ge.exec.deviceId": "x"},
        {"ge.exec.deviceId": "1;1"},
        {"ge.exec.deviceId": "0", "llm.EnableSwitchRole": "maybe"},
        {"ge.exec.deviceId": "0", "llm.SyncKvCacheWaitTime": "0"},
        {"ge.exec.deviceId": "0", "llm.SyncKvCacheWaitTime": "1e3"},
        {"ge.exec.deviceId": "0", "llm.MemoryUtilization": "x"},
        {"ge.exec.deviceId": "0", "llm.MemoryUtilization": "2"},
        {"ge.exec.deviceId": "0", "ge.flowGraphMemMaxSize": "-1"},
        {"ge.exec.deviceId": "0", "llm.LocalCommRes": "", "llm.EnableCacheManager": "0"},
        {"ge.exec.deviceId": "0;1", "llm.EnableCacheManager": "1"},
        {"ge.exec.deviceId": "0", "llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1"},
        {"ge.exec.deviceId": "0", "llm.listenIpInfo": "1.1.1.1"},
    ],
)
def test_wrong_options(wrong):
    with pytest.raises(LLMParamError):
        read_options(wrong, LLMRole.DECODER)


def test_options_are_text():
    for wrong in ([], None, {"ge.exec.deviceId": 0}, {1: "0"}):
        with pytest.raises(TypeError):
            read_options(wrong, LLMRole.DECODER)


def test_pools_and_size_classes():
    assert parse_mem_pool("mem_pool_cfg", '{"memory_size": 5}') == MemPool(5, 16)
    two = {
        "buf_cfg": [
            {"total_size": 2 << 20, "blk_size": 256, "max_buf_size": 4096},
            {"total_size": 4 << 20, "blk_size": 65536, "max_buf_size": 1 << 20},
        ]
    }
    tiers = parse_buffer_tiers("buf_pool_cfg", json.dumps(two))
    assert tiers == [BufferTier(2 << 20, 256, 4096), BufferTier(4 << 20, 65536, 1 << 20)]
    assert [alignment_of(tiers, size) for size in (1, 4096, 4097, 1 << 20, (1 << 20) + 1)] == [
        256, 256, 65536, 65536, None,
    ]  # fmt: skip
    two["buf_cfg"].reverse()
    with pytest.raises(LLMParamError, match="order the tiers"):
        parse_buffer_tiers("buf_pool_cfg", json.dumps(two))
