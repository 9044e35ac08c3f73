"""Every name, signature and default, from one table; and every fragment of code of the document."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvelastic.datadist as d

ROOT = Path(__file__).parents[2]
NO = inspect.Parameter.empty
LAYERS = [("src_layer_range", None), ("dst_layer_range", None)]
PER_LAYER = [("tensor_num_per_layer", 2)]
BLOCK_LISTS = [
    ("src_block_indices", None), ("dst_block_indices", None), ("dst_block_memory_size", None),
]  # fmt: skip
COPY = [
    ("dst", NO), ("src", NO), ("dst_batch_index", 0), ("src_batch_index", 0), ("offset", 0),
    ("size", -1), ("req_id", None),
]  # fmt: skip
SWAP = [("src_cache", NO), ("dst_cache", NO), ("src_to_dst", NO)]
ASYNC = [("src_cache", NO), ("layer_synchronizer", NO), ("transfer_configs", NO), *BLOCK_LISTS]
ALLOCATE = [("cache_desc", NO), ("cache_keys", ())]
ALLOCATE_BLOCKS = [("cache_desc", NO), ("blocks_cache_key", None)]

SIGNATURES: dict[str, list[tuple[str, object]]] = {
    "LLMDataDist": [("role", NO), ("cluster_id", NO)],
    "LLMDataDist.init": [("options", NO)],
    "LLMDataDist.finalize": [],
    "LLMDataDist.link_clusters": [("clusters", NO), ("timeout", 3000)],
    "LLMDataDist.unlink_clusters": [("clusters", NO), ("timeout", 3000), ("force", False)],
    "LLMDataDist.check_link_status": [("remote_cluster_id", NO)],
    "LLMDataDist.switch_role": [("role", NO), ("switch_options", None)],
    "LLMDataDist.link": [("comm_name", NO), ("cluster_rank_info", NO), ("rank_table", NO)],
    "LLMDataDist.unlink": [("comm_id", NO)],
    "LLMDataDist.query_register_mem_status": [("comm_id", NO)],
    "LLMConfig": [],
    "LLMConfig.generate_options": [],
    "KvCacheManager.is_initialized": [],
    "KvCacheManager.allocate_cache": ALLOCATE,
    "KvCacheManager.deallocate_cache": [("cache", NO)],
    "KvCacheManager.remove_cache_key": [("cache_key", NO)],
    "KvCacheManager.pull_cache": [
        ("cache_key", NO), ("kv_cache", NO), ("batch_index", 0), ("size", -1), ("kwargs", NO),
    ],
    "KvCacheManager.copy_cache": COPY,
    "KvCacheManager.get_cache_tensors": [("cache", NO), ("tensor_index", 0)],
    "KvCacheManager.allocate_blocks_cache": ALLOCATE_BLOCKS,
    "KvCacheManager.pull_blocks": [
        ("prompt_cache_key", NO), ("decoder_kv_cache", NO), ("prompt_blocks", NO),
        ("decoder_blocks", NO), ("kwargs", NO),
    ],
    "KvCacheManager.copy_blocks": [("cache", NO), ("copy_block_info", NO)],
    "KvCacheManager.swap_blocks": SWAP,
    "KvCacheManager.transfer_cache_async": ASYNC,
    "CacheManager.allocate_cache": ALLOCATE,
    "CacheManager.deallocate_cache": [("cache", NO)],
    "CacheManager.allocate_blocks_cache": ALLOCATE_BLOCKS,
    "CacheManager.deallocate_blocks_cache": [("cache", NO)],
    "CacheManager.remove_cache_key": [("cache_key", NO)],
    "CacheManager.copy_cache": COPY,
    "CacheManager.copy_blocks": [("cache", NO), ("copy_block_info", NO)],
    "CacheManager.swap_blocks": SWAP,
    "CacheManager.register_cache": [
        ("cache_desc", NO), ("addrs", NO), ("cache_keys", ()), ("remote_accessible", None),
    ],
    "CacheManager.register_blocks_cache": [
        ("cache_desc", NO), ("addrs", NO), ("blocks_cache_key", None),
        ("remote_accessible", None),
    ],
    "CacheManager.unregister_cache": [("cache_id", NO)],
    "CacheManager.pull_cache": [
        ("cache_key", NO), ("cache", NO), ("batch_index", 0), ("size", -1), ("kwargs", NO),
    ],
    "CacheManager.pull_blocks": [
        ("src_cache_key", NO), ("dst_cache", NO), ("src_blocks", ()), ("dst_blocks", ()),
        ("kwargs", NO),
    ],
    "CacheManager.push_cache": [
        ("dst_cache_key", NO), ("src_cache", NO), ("src_batch_index", 0), *LAYERS,
        ("size", -1), *PER_LAYER,
    ],
    "CacheManager.push_blocks": [
        ("dst_cache_key", NO), ("src_cache", NO), ("src_blocks", ()), ("dst_blocks", ()),
        *LAYERS, *PER_LAYER,
    ],
    "CacheManager.transfer_cache_async": ASYNC,
    "CacheManager.remap_registered_memory": [("mem_infos", NO)],
    "KvCache.create_cpu_cache": [("cache_desc", NO), ("addrs", NO)],
    "Cache.create_cpu_cache": [("cache_desc", NO), ("addrs", NO)],
    "LLMClusterInfo": [],
    "LLMClusterInfo.append_local_ip_info": [("ip", NO), ("port", NO)],
    "LLMClusterInfo.append_remote_ip_info": [("ip", NO), ("port", NO)],
    "CacheTask.synchronize": [("timeout_in_millis", None)],
    "CacheTask.get_results": [("timeout_in_millis", None)],
    "LayerSynchronizer.synchronize_layer": [("layer_index", NO), ("timeout_in_millis", NO)],
    "CacheDesc": [
        ("num_tensors", NO), ("shape", NO), ("data_type", NO),
        ("placement", d.Placement.DEVICE), ("batch_dim_index", 0), ("seq_len_dim_index", -1),
        ("kv_tensor_format", None),
    ],
    "CacheKeyByIdAndIndex": [("cluster_id", NO), ("cache_id", NO), ("batch_index", 0)],
    "TransferConfig": [
        ("dst_cluster_id", NO), ("dst_addrs", NO), ("src_layer_range", None),
        ("src_batch_index", 0),
    ],
    "TransferWithCacheKeyConfig": [
        ("cache_key", NO), *LAYERS, ("src_batch_index", 0),
    ],
    "MemInfo": [("mem_type", NO), ("addr", NO), ("size", NO)],
}  # fmt: skip
PROPERTIES = {
    "LLMDataDist": ["kv_cache_manager", "cache_manager"],
    "KvCache": ["cache_id", "cache_desc", "per_device_tensor_addrs"],
    "Cache": ["cache_id", "cache_desc", "tensor_addrs", "is_blocks_cache"],
    "LLMClusterInfo": ["remote_cluster_id", "remote_role_type"],
    "LLMException": ["status_code"],
    "CacheDesc": ["size", "batch_size"],
}


def find(path: str) -> object:
    found: object = d
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_a_signature(path):
    parameters = inspect.signature(find(path)).parameters.values()
    found = [(one.name, one.default) for one in parameters if one.name != "self"]
    assert found == SIGNATURES[path]


def test_properties():
    for cls, names in PROPERTIES.items():
        for name in names:
            assert isinstance(getattr(getattr(d, cls), name), property), (cls, name)


def test_keys_have_either_name_of_the_cluster():
    for cls in (d.CacheKey, d.BlocksCacheKey):
        names = list(inspect.signature(cls).parameters)
        assert names[0] == "cluster_id"
        assert "prompt_cluster_id" in names
    names = list(inspect.signature(d.CacheKey).parameters)
    assert names[1:4] == ["req_id", "model_id", "prefix_id"]


def test_what_is_exported():
    assert all(hasattr(d, name) for name in d.__all__)
    assert {path.split(".")[0] for path in SIGNATURES} <= set(d.__all__)
    space: dict[str, object] = {}
    exec("from kvelastic.datadist import *", space)
    assert set(d.__all__) <= space.keys()


# ------------------------------------------------------------------------- the document's fragments

# Each as the document has it, in its order; what stands for "..." there is the prelude.
FRAGMENTS = [
    """
cache_desc = CacheDesc(1, [2, 1024 * 1024], DataType.DT_FLOAT16)
cache_keys = [CacheKey(1, req_id=1), CacheKey(1, req_id=2)]
cache = cache_manager.allocate_cache(cache_desc, cache_keys)
""",
    "cache_manager.deallocate_cache(cache)",
    """
cache_keys = [CacheKey(1, req_id=1), CacheKey(1, req_id=2)]
cache_manager.remove_cache_key(cache_keys[0])
cache_manager.remove_cache_key(cache_keys[1])
""",
    "cache_manager.copy_cache(dst_cache, src_cache, 0, 1, 0, 128)",
    """
blocks_cache_key = BlocksCacheKey(1, 0)
blocks_cache = cache_manager.allocate_blocks_cache(cache_desc, blocks_cache_key)
""",
    # Printed once more under deallocate_blocks_cache.
    """
cache_desc = CacheDesc(1, [2, 1024 * 1024], DataType.DT_FLOAT16)
cache_keys = [CacheKey(1, req_id=1), CacheKey(1, req_id=2)]
cache = cache_manager.allocate_cache(cache_desc, cache_keys)
""",
    "cache_manager.copy_blocks(cache, {1: [2,3]})",
    """
from llm_datadist import Cache
npu_cache = cache_manager.allocate_blocks_cache(npu_cache_desc, npu_cache_key)
cpu_cache = Cache.create_cpu_cache(cpu_cache_desc, cpu_addrs)
# swap in
cache_manager.swap_blocks(cpu_cache, npu_cache, {1:2, 3:4})
# swap out
cache_manager.swap_blocks(npu_cache, cpu_cache, {1:2, 3:4})
""",
    """
from llm_datadist import LLMConfig
llm_config = LLMConfig()
llm_config.mem_pool_cfg= "{\\"memory_size\\": 18737418240, \\"page_shift\\": 16}"
""",
    """
from llm_datadist import LLMConfig
llm_config = LLMConfig()
llm_config.host_mem_pool_cfg= "{\\"memory_size\\": 18737418240, \\"page_shift\\": 16}"
""",
]
PRELUDES = {
    3: "dst_cache = cache_manager.allocate_cache(cache_desc);"
    " src_cache = cache_manager.allocate_cache(cache_desc)",
    6: "cache = cache_manager.allocate_blocks_cache(CacheDesc(2, [8, 64], DataType.DT_FLOAT16))",
    7: "import ctypes; npu_cache_desc = CacheDesc(2, [8, 64], DataType.DT_FLOAT16);"
    " npu_cache_key = BlocksCacheKey(1, 7);"
    " cpu_cache_desc = CacheDesc(2, [8, 64], DataType.DT_FLOAT16, Placement.HOST);"
    " memory = ctypes.create_string_buffer(2 * 1024);"
    " cpu_addrs = [ctypes.addressof(memory), ctypes.addressof(memory) + 1024]",
}
BEGIN = """
from kvelastic import datadist_alias as alias
alias.switch_on()
from llm_datadist import *
config = LLMConfig()
config.device_id = 0
config.enable_cache_manager = True
config.mem_pool_cfg = '{"memory_size": 67108864}'
datadist = LLMDataDist(LLMRole.PROMPT, 1)
datadist.init(config.generate_options())
cache_manager = datadist.cache_manager
"""
END = """
cache_manager.check_integrity()
datadist.finalize()
print("all of them")
"""


def test_every_fragment_runs():
    body = [f"{PRELUDES.get(at, '')}\n{code.strip()}\n" for at, code in enumerate(FRAGMENTS)]
    program = "\n".join([BEGIN, *body, END])
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.strip() == "all of them", ended.stderr


# -------------------------------------------------------------------------------------- the alias


def python(program: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if "ALIAS" not in name}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return (ended.stdout or ended.stderr).strip().splitlines()[-1]


def test_the_alias_is_off_by_itself():
    assert "No module named 'llm_datadist'" in python("import kvelastic.datadist, llm_datadist")


def test_the_alias_has_the_same_classes():
    switched = "from kvelastic import datadist_alias as alias; alias.switch_on(); "
    program = "import llm_datadist as a, kvelastic.datadist as b; print(a.Cache is b.Cache)"
    assert python(switched + program) == "True"
    assert python(program, KVELASTIC_LLM_DATADIST_ALIAS="true") == "True"
    assert "No module named" in python(f"{switched} alias.switch_off(); import llm_datadist")


def test_an_installed_one_goes_first(tmp_path):
    (tmp_path / "llm_datadist.py").write_text("WHO = 'theirs'\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from kvelastic import datadist_alias as alias; alias.switch_on();"
        "import llm_datadist; print(llm_datadist.WHO)"
    )
    assert python(program) == "theirs"


def test_the_variable_alone_imports_nothing_of_it():
    program = "import sys; print('kvelastic.datadist' in sys.modules)"
    assert python(program, KVELASTIC_LLM_DATADIST_ALIAS="true") == "False"


def test_the_import_brings_no_torch():
    assert python("import kvelastic.datadist, sys; print('torch' in sys.modules)") == "False"


def test_the_documentation_names_what_there_is():
    text = (ROOT / "docs/datadist.md").read_text()
    for code in re.findall(r"`(LLM_[A-Z_]+)`", text):
        assert code in d.LLMStatusCode.__members__, code
