"""Every name, signature, default and number of the interface, from one table, in both directions.

What the table has and the package lacks fails, and so does what the package has and the table does
not say: so no name can be forgotten in either.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect

import pytest
from datadist_local import first_manager, local_manager, second_options

import kvelastic.datadist as d

INVALID_ID = 2**64 - 1

# A line a member: `call(parameters)`, or `.attribute`; `.attribute = value` can be set, and is that
# until it is. `__init__` is what users call; classes without it are made by calls.
INTERFACE = {
    "LLMDataDist": """
        __init__(role, cluster_id)
        init(options)
        finalize()
        link_clusters(clusters, timeout=3000)
        unlink_clusters(clusters, timeout=3000, force=False)
        check_link_status(remote_cluster_id)
        .kv_cache_manager
        .cache_manager
        switch_role(role, switch_options=None)
        link(comm_name, cluster_rank_info, rank_table)
        unlink(comm_id)
        query_register_mem_status(comm_id)
    """,
    "LLMConfig": """
        __init__()
        generate_options()
        .device_id = None
        .listen_ip_info = ''
        .sync_kv_timeout = None
        .enable_switch_role = False
        .ge_options = {}
        .mem_utilization = 0.95
        .buf_pool_cfg = ''
        .mem_pool_cfg = ''
        .host_mem_pool_cfg = ''
        .enable_cache_manager = False
        .enable_remote_cache_accessible = False
        .rdma_traffic_class = None
        .rdma_service_level = None
        .local_comm_res = ''
        .link_total_time = 0
        .link_retry_count = 1
        .transfer_backend = ''
        .global_resource_config = ''
    """,
    "KvCacheManager": """
        is_initialized()
        allocate_cache(cache_desc, cache_keys=())
        deallocate_cache(cache)
        remove_cache_key(cache_key)
        pull_cache(cache_key, kv_cache, batch_index=0, size=-1, **kwargs)
        copy_cache(dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None)
        get_cache_tensors(cache, tensor_index=0)
        allocate_blocks_cache(cache_desc, blocks_cache_key=None)
        pull_blocks(prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, **kwargs)
        copy_blocks(cache, copy_block_info)
        swap_blocks(src_cache, dst_cache, src_to_dst)
        transfer_cache_async(src_cache, layer_synchronizer, transfer_configs,\
 src_block_indices=None, dst_block_indices=None, dst_block_memory_size=None)
    """,
    "CacheManager": """
        allocate_cache(cache_desc, cache_keys=())
        deallocate_cache(cache)
        allocate_blocks_cache(cache_desc, blocks_cache_key=None)
        deallocate_blocks_cache(cache)
        register_cache(cache_desc, addrs, cache_keys=(), remote_accessible=None)
        register_blocks_cache(cache_desc, addrs, blocks_cache_key=None, remote_accessible=None)
        unregister_cache(cache_id)
        remove_cache_key(cache_key)
        pull_cache(cache_key, cache, batch_index=0, size=-1, **kwargs)
        pull_blocks(src_cache_key, dst_cache, src_blocks=(), dst_blocks=(), **kwargs)
        push_cache(dst_cache_key, src_cache, src_batch_index=0, src_layer_range=None,\
 dst_layer_range=None, size=-1, tensor_num_per_layer=2)
        push_blocks(dst_cache_key, src_cache, src_blocks=(), dst_blocks=(), src_layer_range=None,\
 dst_layer_range=None, tensor_num_per_layer=2)
        copy_cache(dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None)
        copy_blocks(cache, copy_block_info)
        swap_blocks(src_cache, dst_cache, src_to_dst)
        transfer_cache_async(src_cache, layer_synchronizer, transfer_configs,\
 src_block_indices=None, dst_block_indices=None, dst_block_memory_size=None)
        remap_registered_memory(mem_infos)
    """,
    "KvCache": """
        .cache_id
        .cache_desc
        .per_device_tensor_addrs
        create_cpu_cache(cache_desc, addrs)
    """,
    "Cache": """
        .cache_id
        .cache_desc
        .tensor_addrs
        .is_blocks_cache
        create_cpu_cache(cache_desc, addrs)
    """,
    "LLMClusterInfo": """
        __init__()
        .remote_cluster_id = None
        .remote_role_type = None
        append_local_ip_info(ip, port)
        append_remote_ip_info(ip, port)
    """,
    "CacheTask": """
        synchronize(timeout_in_millis=None)
        get_results(timeout_in_millis=None)
    """,
    "LayerSynchronizer": """
        __init__()
        synchronize_layer(layer_index, timeout_in_millis)
    """,
    "CacheDesc": """
        __init__(num_tensors, shape, data_type, placement=Placement.DEVICE, batch_dim_index=0,\
 seq_len_dim_index=-1, kv_tensor_format=None)
        .num_tensors
        .shape
        .data_type
        .placement
        .batch_dim_index
        .seq_len_dim_index
        .kv_tensor_format
        .size
        .batch_size
    """,
    # Either name of the cluster is taken, and one has to be given.
    "CacheKey": """
        __init__(cluster_id=None, req_id=None, model_id=0, prefix_id=INVALID_ID, *,\
 prompt_cluster_id=None)
        .cluster_id
        .prompt_cluster_id
        .req_id
        .model_id
        .prefix_id
    """,
    "CacheKeyByIdAndIndex": """
        __init__(cluster_id, cache_id, batch_index=0)
        .cluster_id
        .cache_id
        .batch_index
    """,
    "BlocksCacheKey": """
        __init__(cluster_id=None, model_id=0, *, prompt_cluster_id=None)
        .cluster_id
        .prompt_cluster_id
        .model_id
    """,
    "TransferConfig": """
        __init__(dst_cluster_id, dst_addrs, src_layer_range=None, src_batch_index=0)
        .dst_cluster_id
        .dst_addrs
        .src_layer_range
        .src_batch_index
    """,
    "TransferWithCacheKeyConfig": """
        __init__(cache_key, src_layer_range=None, dst_layer_range=None, src_batch_index=0)
        .cache_key
        .src_layer_range
        .dst_layer_range
        .src_batch_index
        .dst_cluster_id
    """,
    "MemInfo": """
        __init__(mem_type, addr, size)
        .mem_type
        .addr
        .size
    """,
    "Tensor": """
        numpy()
    """,
    "Status": """
        __init__(status)
        .status_code
        is_ok()
    """,
    "LLMException": """
        __init__(*args, status_code=LLMStatusCode.LLM_SUCCESS)
        .status_code
    """,
}

INTERFACE["LlmConfig"] = INTERFACE["LLMConfig"]  # its older name

# What `**kwargs` above stands for.
LAYERS = ("src_layer_range", "dst_layer_range", "tensor_num_per_layer")
KEYWORDS = {
    "KvCacheManager.pull_cache": (*LAYERS, "src_cache_offset", "dst_cache_offset"),
    "KvCacheManager.pull_blocks": LAYERS,
    "CacheManager.pull_cache": LAYERS,
    "CacheManager.pull_blocks": LAYERS,
}

# Public because other files of the package use it; no part of the interface.
OURS = {
    "LLMDataDist": {"cluster_id"},
    "KvCacheManager": {"finalize", "check_integrity", "switch_role"},
    "CacheManager": {"finalize", "check_integrity"},
    "KvCache": {"is_blocks_cache", "device_addrs", "invalidate"},
    "Cache": {"device_addrs", "invalidate"},
    "LLMClusterInfo": {"local_ip_infos", "remote_ip_infos"},
    "CacheTask": {"note", "end"},
    "CacheDesc": {"row_bytes"},
    "CacheKey": {"is_placeholder", "index"},
    "CacheKeyByIdAndIndex": {"index"},
    "BlocksCacheKey": {"is_placeholder", "index"},
    "LLMStatusCode": {"is_recoverable"},
}  # fmt: skip

N = 0x5010B000
ENUMS = {
    "LLMRole": {"PROMPT": 1, "DECODER": 2, "MIX": 3},
    "Placement": {"HOST": 0, "DEVICE": 1},
    "Memtype": {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1},
    "RegisterMemStatus": {"OK": 0, "PREPARING": 1, "FAILED": 2},
    "DataType": {
        "DT_FLOAT": 0, "DT_FLOAT16": 1, "DT_INT8": 2, "DT_INT32": 3, "DT_UINT8": 4,
        "DT_INT16": 6, "DT_UINT16": 7, "DT_UINT32": 8, "DT_INT64": 9, "DT_UINT64": 10,
        "DT_DOUBLE": 11, "DT_BOOL": 12, "DT_STRING": 13, "DT_BF16": 27,
    },
    "LLMStatusCode": {
        "LLM_SUCCESS": 0, "LLM_FAILED": 0xFFFFFFFF, "LLM_UNKNOWN_ERROR": -1,
        "LLM_WAIT_PROCESS_TIMEOUT": N + 1, "LLM_KV_CACHE_NOT_EXIST": N + 2,
        "LLM_REPEAT_REQUEST": N + 3, "LLM_REQUEST_ALREADY_COMPLETED": N + 4,
        "LLM_PARAM_INVALID": N + 5, "LLM_ENGINE_FINALIZED": N + 6, "LLM_NOT_YET_LINK": N + 7,
        "LLM_ALREADY_LINK": N + 8, "LLM_LINK_FAILED": N + 9, "LLM_UNLINK_FAILED": N + 10,
        "LLM_NOTIFY_PROMPT_UNLINK_FAILED": N + 11, "LLM_CLUSTER_NUM_EXCEED_LIMIT": N + 12,
        "LLM_PROCESSING_LINK": N + 13, "LLM_DEVICE_OUT_OF_MEMORY": N + 14,
        "LLM_PREFIX_ALREADY_EXIST": N + 15, "LLM_PREFIX_NOT_EXIST": N + 16,
        "LLM_SEQ_LENOVERLIMIT": N + 17, "LLM_SEQ_LEN_OVER_LIMIT": N + 17,
        "LLM_NO_FREE_BLOCK": N + 18,
        "LLM_BLOCKS_OUT_OF_MEMORY": N + 19, "LLM_EXIST_LINK": N + 24,
        "LLM_FEATURE_NOT_ENABLED": N + 25, "LLM_TIMEOUT": N + 26, "LLM_LINK_BUSY": N + 27,
        "LLM_OUT_OF_MEMORY": N + 28,
        # The runtime's own numbers.
        "LLM_DEVICE_MEM_ERROR": 507053, "LLM_SUSPECT_REMOTE_ERROR": 507057,
    },
}  # fmt: skip


def lines_of(name: str) -> list[str]:
    return [line.strip() for line in INTERFACE[name].strip().splitlines()]


def members_of(name: str) -> set[str]:
    """What the table says of a class, by name."""
    said = {line.lstrip(".").split("(")[0].split(" ")[0] for line in lines_of(name)}
    return said - {"__init__"}


def public_names(cls: type) -> set[str]:
    """What classes of the package have that one is made of: members, and fields of its values."""
    own = [one for one in cls.__mro__ if one.__module__.startswith("kvelastic.datadist")]
    found = {name for one in own for name in vars(one)}
    found |= fields_of(cls)
    if issubclass(cls, enum.Enum):
        found -= cls.__members__.keys()
    return {name for name in found if not name.startswith("_")}


def fields_of(cls: type) -> set[str]:
    return {one.name for one in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


def parameters(signature: inspect.Signature) -> list[tuple[str, object, object]]:
    every = signature.parameters.values()
    return [(one.name, one.kind, one.default) for one in every if one.name != "self"]


def test_exported_names_match_the_table():
    assert INTERFACE.keys() | ENUMS.keys() == set(d.__all__)
    space: dict[str, object] = {}
    exec("from kvelastic.datadist import *", space)
    assert set(d.__all__) == space.keys() - {"__builtins__"}


@pytest.mark.parametrize("name", [*INTERFACE, *ENUMS])
def test_class_members_match_the_table(name):
    said = members_of(name) if name in INTERFACE else set()
    assert public_names(getattr(d, name)) == said | OURS.get(name, set())


CALLS = [(name, line) for name in INTERFACE for line in lines_of(name) if "(" in line]


@pytest.mark.parametrize(("name", "line"), CALLS, ids=[f"{a}.{b}" for a, b in CALLS])
def test_signature_matches_the_table(name, line):
    space = vars(d) | {"INVALID_ID": INVALID_ID}
    exec(f"def {line}: ...", space)
    call, _, _ = line.partition("(")
    found = getattr(d, name) if call == "__init__" else getattr(getattr(d, name), call)
    assert parameters(inspect.signature(found)) == parameters(inspect.signature(space[call]))


ATTRIBUTES = [(name, line) for name in INTERFACE for line in lines_of(name) if line[0] == "."]


@pytest.mark.parametrize(("name", "line"), ATTRIBUTES, ids=[f"{a}{b}" for a, b in ATTRIBUTES])
def test_attribute_matches_the_table(name, line):
    attribute, settable, value = line[1:].partition(" = ")
    cls = getattr(d, name)
    static = inspect.getattr_static(cls, attribute, None)
    if settable:
        assert hasattr(static, "__set__")
        assert getattr(cls(), attribute) == eval(value)
    elif attribute not in fields_of(cls):
        assert isinstance(static, property)
        assert static.fset is None


@pytest.mark.parametrize("path", KEYWORDS)
def test_pull_keywords_are_checked(path, manager_of):
    """Each is known and checked; what is not among them is refused."""
    name, call = path.split(".")
    manager = manager_of(name)
    positional = parameters(inspect.signature(getattr(manager, call)))
    needed = sum(default is inspect.Parameter.empty for _, _, default in positional[:-1])
    arguments = [None] * needed
    for keyword in KEYWORDS[path]:
        with pytest.raises(TypeError, match=f"^{keyword} is a str"):
            getattr(manager, call)(*arguments, **{keyword: "x"})
    for other in {*KEYWORDS["KvCacheManager.pull_cache"], "layers"} - {*KEYWORDS[path]}:
        with pytest.raises(TypeError, match=f"unexpected keyword arguments: {other}"):
            getattr(manager, call)(*arguments, **{other: 1})


@pytest.fixture
def manager_of():
    opened = []

    def make(name):
        if name == "CacheManager":
            manager, caches = local_manager(second_options())
        else:
            manager, caches = first_manager({"ge.exec.deviceId": "0"}, d.LLMRole.DECODER)
        opened.append(caches)
        return manager

    yield make
    for caches in opened:
        caches.close()


@pytest.mark.parametrize("name", ENUMS)
def test_enum_values_match_the_table(name):
    members = getattr(d, name).__members__  # aliases, too
    assert {one: member.value for one, member in members.items()} == ENUMS[name]


def test_layer_synchronizer_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        d.LayerSynchronizer()


def test_call_before_init_raises_runtime_error():
    assert issubclass(d.LLMException, RuntimeError)
    datadist = d.LLMDataDist(d.LLMRole.MIX, 1)
    for call in (
        lambda: datadist.cache_manager,
        lambda: datadist.kv_cache_manager,
        lambda: datadist.link_clusters([]),
        lambda: datadist.unlink_clusters([]),
        lambda: datadist.check_link_status(1),
        lambda: datadist.switch_role(d.LLMRole.MIX),
        lambda: datadist.link("a", {}, ""),
        lambda: datadist.unlink(1),
        lambda: datadist.query_register_mem_status(1),
    ):
        with pytest.raises(RuntimeError, match="not initialized") as failed:
            call()
        assert not isinstance(failed.value, d.LLMException)


def test_mem_info_checks_types_and_values():
    assert d.MemInfo(d.Memtype.MEM_TYPE_HOST, 4096, 10).mem_type is d.Memtype.MEM_TYPE_HOST
    for wrong in ((0, 1, 1), (d.Memtype.MEM_TYPE_HOST, "1", 1), (d.Memtype.MEM_TYPE_HOST, 1, 1.5)):
        with pytest.raises(TypeError):
            d.MemInfo(*wrong)
    for wrong in ((-1, 1), (1 << 64, 1), (1, -1), (1, 0)):
        with pytest.raises(ValueError, match="not accepted"):
            d.MemInfo(d.Memtype.MEM_TYPE_DEVICE, *wrong)
