"""Descriptors, keys, clusters, groups and codes: plain values and what they refuse."""

from __future__ import annotations

import json
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest

from kvelastic import errors
from kvelastic.datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from kvelastic.datadist.cache_layout import Run, pairs_merged, row_as_blocks
from kvelastic.datadist.descriptors import item_bytes
from kvelastic.datadist.group_links import parse_group
from kvelastic.datadist.socket_addresses import SocketAddresses
from kvelastic.datadist.status import (
    LLMParamError,
    as_llm_exceptions,
    status_of,
    status_of_number,
)
from kvelastic.messages import MOST_PATH_BYTES

INVALID = 2**64 - 1
KEY = BlocksCacheKey(1)
ONE_BYTE = CacheDesc(1, [1], DataType.DT_INT8)


def wrong(value: object) -> Any:
    """A value of a type that the callee does not take."""
    return value


def test_cache_description_computes_its_sizes():
    desc = CacheDesc(80, [4, 2048, 1, 128], DataType.DT_FLOAT16)
    assert (desc.size, desc.batch_size, desc.row_bytes) == (2 << 20, 4, 1 << 19)
    assert desc == CacheDesc(80, (4, 2048, 1, 128), DataType.DT_FLOAT16, Placement.DEVICE, 0, -1)
    assert CacheDesc(1, [2, 3], DataType.DT_INT8, batch_dim_index=1).batch_size == 3
    assert [item_bytes(one) for one in DataType] == [4, 2, 1, 4, 1, 2, 2, 4, 8, 8, 8, 1, 0, 2]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (TypeError, lambda: CacheDesc(wrong("1"), [1], DataType.DT_INT8)),
        (TypeError, lambda: CacheDesc(1, wrong(1), DataType.DT_INT8)),
        (TypeError, lambda: CacheDesc(1, [wrong(1.0)], DataType.DT_INT8)),
        (TypeError, lambda: CacheDesc(1, [1], wrong(1))),
        (TypeError, lambda: CacheDesc(1, [1], DataType.DT_INT8, wrong(1))),
        (TypeError, lambda: CacheDesc(1, [1], DataType.DT_INT8, kv_tensor_format=wrong(1))),
        (ValueError, lambda: CacheDesc(0, [1], DataType.DT_INT8)),
        (ValueError, lambda: CacheDesc(1, [], DataType.DT_INT8)),
        (ValueError, lambda: CacheDesc(1, [1, 0], DataType.DT_INT8)),
        (ValueError, lambda: CacheDesc(1, [1], DataType.DT_STRING)),
        (ValueError, lambda: CacheDesc(1, [1], DataType.DT_INT8, batch_dim_index=1)),
        (ValueError, lambda: CacheDesc(1, [1], DataType.DT_INT8, seq_len_dim_index=-2)),
        (ValueError, lambda: CacheDesc(2, [1 << 62], DataType.DT_INT8)),
        (TypeError, lambda: CacheKey(1)),
        (TypeError, lambda: CacheKey(req_id=1)),
        (TypeError, lambda: CacheKey(1, 2, prompt_cluster_id=1)),
        (TypeError, lambda: CacheKey(1, wrong("2"))),
        (ValueError, lambda: CacheKey(1, -1)),
        (ValueError, lambda: CacheKey(1 << 64, 1)),
        (ValueError, lambda: CacheKey(1, INVALID).index),
        (ValueError, lambda: CacheKey(1, 1, prefix_id=1).index),
        (TypeError, BlocksCacheKey),
        (ValueError, lambda: BlocksCacheKey(1, -1)),
        (TypeError, lambda: CacheKeyByIdAndIndex(1, wrong(None))),
        (ValueError, lambda: CacheKeyByIdAndIndex(1, -1)),
        (AttributeError, lambda: Cache.create_cpu_cache(wrong(None), [1])),
        (AttributeError, lambda: Cache.create_cpu_cache(ONE_BYTE, wrong(None))),
        (ValueError, lambda: Cache.create_cpu_cache(ONE_BYTE, [1])),
        (TypeError, lambda: TransferConfig(wrong("1"), [1])),
        (TypeError, lambda: TransferConfig(1, wrong(1))),
        (ValueError, lambda: TransferConfig(1, [])),
        (ValueError, lambda: TransferConfig(1, [0])),
        (ValueError, lambda: TransferConfig(1, [1], range(0, 4, 2))),
        (ValueError, lambda: TransferConfig(1, [1], range(0))),
        (TypeError, lambda: TransferConfig(1, [1], wrong((0, 1)))),
        (ValueError, lambda: TransferConfig(1, [1], src_batch_index=-1)),
        (TypeError, lambda: TransferWithCacheKeyConfig(wrong(CacheKey(1, 1)), range(1), range(1))),
        (ValueError, lambda: TransferWithCacheKeyConfig(KEY)),
        (ValueError, lambda: TransferWithCacheKeyConfig(KEY, range(1), range(2))),
        (ValueError, lambda: TransferWithCacheKeyConfig(KEY, range(1), range(1), 1)),
    ],
)  # fmt: skip
def test_invalid_values_are_refused(kind, make):
    with pytest.raises(kind):
        make()


def test_keys():
    assert CacheKey(1, req_id=7).index == ("request", 7, 0)
    assert CacheKey(prompt_cluster_id=1, req_id=INVALID, model_id=2, prefix_id=9).index == (
        "prefix", 9, 2,
    )  # fmt: skip
    assert CacheKey(1, 7).prompt_cluster_id == 1
    assert CacheKey(1, INVALID).is_placeholder
    assert BlocksCacheKey(prompt_cluster_id=3) == BlocksCacheKey(3, 0)
    assert len({CacheKey(1, 7), CacheKey(1, 7), BlocksCacheKey(1)}) == 2
    assert CacheKeyByIdAndIndex(1, 2).batch_index == 0


def test_cpu_caches():
    desc = CacheDesc(2, [4], DataType.DT_INT8, Placement.HOST)
    assert Cache.create_cpu_cache(desc, [16, 32]).tensor_addrs == [16, 32]
    assert KvCache.create_cpu_cache(desc, [16, 32]).per_device_tensor_addrs == [[16, 32]]
    two = KvCache.create_cpu_cache(desc, [[16, 32], (48, 64)])
    assert two.per_device_tensor_addrs == [[16, 32], [48, 64]]
    for wrong in ([16], [16, 0], [16, 32, 48]):
        with pytest.raises(ValueError, match="addr"):
            Cache.create_cpu_cache(desc, wrong)


def test_clusters():
    cluster = LLMClusterInfo()
    assert cluster.remote_cluster_id is None
    cluster.remote_cluster_id = 5
    cluster.remote_role_type = LLMRole.PROMPT
    cluster.append_local_ip_info("127.0.0.1", 0)
    # A number has the bytes of an in_addr, as the original reads it on every machine that it has.
    cluster.append_remote_ip_info(int.from_bytes(socket.inet_aton("127.0.0.1"), "little"), 26000)
    assert cluster.local_ip_infos == [("127.0.0.1", 0)]
    assert cluster.remote_ip_infos == [("127.0.0.1", 26000)]
    for ip, port in ((1.5, 1), (None, 1), ("127.0.0.1", "1"), (True, 1)):
        with pytest.raises(TypeError):
            cluster.append_remote_ip_info(ip, port)
    for ip, port in (("host", 1), ("127.0.0.1", 1 << 16), (1 << 32, 1), (-1, 1), ("127.0.0.1", -1)):
        with pytest.raises(LLMParamError):
            cluster.append_remote_ip_info(ip, port)
    with pytest.raises(TypeError):
        cluster.remote_cluster_id = "1"
    with pytest.raises(TypeError):
        cluster.remote_role_type = 1


def table(*servers: tuple[str, tuple[int, ...]]) -> str:
    return json.dumps(
        {
            "version": "1.2",
            "server_list": [
                {
                    "server_id": host,
                    "device": [{"rank_id": str(rank), "device_id": "0"} for rank in ranks],
                }
                for host, ranks in servers
            ],
        }
    )


def test_rank_table_is_parsed_into_a_group():
    here = table(("node-7", (0, 1)))
    group = parse_group(2, "pd", {1: 0, 2: 1}, here)
    assert (group.cluster_id, group.ranks, group.elsewhere) == (2, {1: 0, 2: 1}, [])
    assert group.others == {1}
    assert group.token == parse_group(1, "pd", {2: 1, 1: 0}, here).token
    assert group.token != parse_group(1, "dp", {2: 1, 1: 0}, here).token
    apart = table(("10.0.0.1", (0,)), ("10.0.0.2", (1, 2)))
    group = parse_group(3, "pd", {1: 0, 3: 1, 2: 2}, apart)
    assert (group.others, group.elsewhere) == ({1, 2}, [1])


@pytest.mark.parametrize(
    ("name", "ranks", "text"),
    [
        ("", {1: 0, 2: 1}, table(("a", (0, 1)))),
        ("n" * 128, {1: 0, 2: 1}, table(("a", (0, 1)))),
        ("n", {1: 0}, table(("a", (0,)))),
        ("n", {one: one - 1 for one in range(1, 6)}, table(("a", tuple(range(5))))),
        ("n", {1: 0, 2: 2}, table(("a", (0, 1)))),
        ("n", {1: 0, 2: 0}, table(("a", (0, 1)))),
        ("n", {3: 0, 2: 1}, table(("a", (0, 1)))),
        ("n", {1: 0, 2: 1}, table(("a", (0,)))),
        ("n", {1: 0, 2: 1}, table(("a", (0,)), ("b", (1,)))),
        ("n", {1: 0, 2: 1}, table(("10.0.0.1", (0, 1)), ("10.0.0.2", (1,)))),
        ("n", {1: 0, 2: 1}, "{}"),
        ("n", {1: 0, 2: 1}, '{"server_list": [1]}'),
        ("n", {1: 0, 2: 1}, '{"server_list": [{"server_id": "a", "device": [1]}]}'),
        ("n", {1: 0, 2: 1}, table(("a", (0, 1))).replace('"1"', '"' + "0" * 9999 + '"')),
        ("n", {1: 0, 2: 1}, "["),
    ],
)
def test_invalid_groups_are_refused(name, ranks, text):
    with pytest.raises(LLMParamError):
        parse_group(1, name, ranks, text)


def test_contiguous_runs_are_merged():
    def runs(*starts: int) -> list[Run]:
        return [Run(0, start, 4) for start in starts]

    assert pairs_merged(runs(0, 4, 8), runs(8, 12, 16)) == [(Run(0, 0, 12), Run(0, 8, 12))]
    assert len(pairs_merged(runs(0, 4), runs(4, 0))) == 2
    assert len(pairs_merged(runs(0, 4), [Run(0, 0, 4), Run(1, 4, 4)])) == 2


def test_row_is_split_into_blocks():
    desc = CacheDesc(1, [2, 10], DataType.DT_INT8)
    assert row_as_blocks(desc, [0], 1, 3, 4) == [Run(0, 10, 4), Run(0, 14, 4), Run(0, 18, 2)]
    assert row_as_blocks(desc, [0], 0, 2, 4) == [Run(0, 0, 4), Run(0, 4, 4)]
    with pytest.raises(LLMParamError):
        row_as_blocks(desc, [0], 0, 4, 4)


# ------------------------------------------------------------------------------------------ codes


def test_numbers_of_codes():
    assert LLMStatusCode.LLM_SUCCESS == 0
    assert LLMStatusCode.LLM_FAILED == 0xFFFFFFFF
    assert LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT == 0x5010B001
    assert LLMStatusCode.LLM_OUT_OF_MEMORY == 0x5010B000 + 28
    assert status_of_number(0x5010B005) is LLMStatusCode.LLM_PARAM_INVALID
    assert status_of_number(12345) is LLMStatusCode.LLM_UNKNOWN_ERROR
    assert [one.name for one in LLMStatusCode if not one.is_recoverable] == [
        "LLM_FAILED", "LLM_UNKNOWN_ERROR", "LLM_SUSPECT_REMOTE_ERROR",
    ]  # fmt: skip


@pytest.mark.parametrize("cls", [cls for _, cls in sorted(errors.errors_by_code().items())])
def test_every_error_has_a_status(cls):
    """None of them is `LLM_SUCCESS`, and what a parent's class is its child is, too."""
    assert status_of(cls("x")) is not LLMStatusCode.LLM_SUCCESS


def test_library_errors_become_llm_exceptions():
    with pytest.raises(LLMException) as failed, as_llm_exceptions("allocate"):
        raise errors.LimitReachedError("no more")
    assert failed.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
    assert isinstance(failed.value, RuntimeError)
    assert isinstance(failed.value.__cause__, errors.LimitReachedError)
    assert "allocate: no more" in str(failed.value)
    with pytest.raises(LLMParamError) as refused, as_llm_exceptions("allocate"):
        raise LLMParamError("x")
    assert isinstance(refused.value, ValueError)
    again = pickle.loads(pickle.dumps(LLMException("x", status_code=LLMStatusCode.LLM_TIMEOUT)))
    assert again.status_code is LLMStatusCode.LLM_TIMEOUT


def test_overlong_socket_path_is_refused(tmp_path: Path) -> None:
    room = MOST_PATH_BYTES - len(str(tmp_path)) - len("/" + "/" + "cluster_1")
    addresses = SocketAddresses(tmp_path / ("x" * room), None, (), None)
    assert len(addresses.cluster(1).path) == MOST_PATH_BYTES
    for too_long in (lambda: addresses.cluster(12), lambda: addresses.towards("127.0.0.1", 65535)):
        with pytest.raises(errors.ChannelError, match="XDG_RUNTIME_DIR"):
            too_long()


def test_enumerations_print_as_their_names():
    for one in (LLMRole.MIX, Placement.HOST, DataType.DT_BF16, LLMStatusCode.LLM_TIMEOUT):
        said = f"{type(one).__name__}.{one.name}"
        assert str(one) == f"{one}" == f"{one:s}" == said
        assert f"{one:>40}" == said.rjust(40)
        assert json.loads(json.dumps(one)) == one.value


def test_a_cpu_cache_is_a_blocks_cache():
    desc = CacheDesc(1, [2, 4], DataType.DT_INT8, Placement.HOST)
    assert Cache.create_cpu_cache(desc, [4096]).is_blocks_cache


def test_transfer_config_fields_are_assignable():
    config = TransferConfig(1, [1, 2])
    config.src_layer_range = range(1)
    config.dst_addrs = [3, 4]
    by_key = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(1))
    by_key.src_layer_range = by_key.dst_layer_range = range(2, 4)
    by_key.cache_key = BlocksCacheKey(2)
    assert by_key.dst_cluster_id == 2
    assert len({config, by_key}) == 2
