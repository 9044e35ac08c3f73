"""Every fragment of code of the second generation's document runs, in its order, in one process.

A fragment stands as the document has it, below its heading. What the test adds stands above it in
`prelude`: the values that the document takes for granted.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import pytest
from processes import run_python

import kvelastic.datadist as d

# Each of them as it stands under "function prototype": annotations are names of the interface.
PROTOTYPES = {
    "allocate_cache": """
allocate_cache(cache_desc: CacheDesc, cache_keys: Union[Tuple[CacheKey], List[CacheKey]] = ())
""",
    "deallocate_cache": "deallocate_cache(cache: Cache)",
    "remove_cache_key": "remove_cache_key(cache_key: CacheKey)",
    "copy_cache": """
copy_cache(dst: Cache, src: Cache, dst_batch_index: int = 0, src_batch_index: int = 0,\
 offset: int = 0, size: int = -1, req_id: Optional[int] = None)
""",
    "allocate_blocks_cache": """
allocate_blocks_cache(cache_desc: CacheDesc, blocks_cache_key: Optional[BlocksCacheKey] = None)
""",
    "copy_blocks": "copy_blocks(cache: Cache, copy_block_info: Dict[int, List[int]])",
    "swap_blocks": "swap_blocks(src_cache: Cache, dst_cache: Cache, src_to_dst: Dict[int, int])",
}


@pytest.mark.parametrize("name", PROTOTYPES)
def test_prototype_matches_the_document(name):
    space: dict[str, object] = {}
    exec(
        "from kvelastic.datadist import *\nfrom typing import *\n"
        f"def {PROTOTYPES[name].strip()}: ...",
        space,
    )
    meant = [*inspect.signature(space[name]).parameters.values()]
    found = [*inspect.signature(getattr(d.CacheManager, name)).parameters.values()][1:]
    assert [(one.name, one.kind, one.default) for one in found] == [
        (one.name, one.kind, one.default) for one in meant
    ]


class Fragment(NamedTuple):
    heading: str
    prelude: str
    code: str


FRAGMENTS = [
    Fragment(
        "allocate_cache",
        """
from kvelastic import datadist_alias
datadist_alias.switch_on()
from llm_datadist import *
config = LLMConfig()
config.device_id = 0
config.enable_cache_manager = True
config.mem_pool_cfg = '{"memory_size": 67108864}'
datadist = LLMDataDist(LLMRole.PROMPT, 1)
datadist.init(config.generate_options())
cache_manager = datadist.cache_manager
""",
        """
from llm_datadist import *
...
cache_desc = CacheDesc(1, [2, 1024 * 1024], DataType.DT_FLOAT16)
cache_keys = [CacheKey(1, req_id=1), CacheKey(1, req_id=2)]
cache = cache_manager.allocate_cache(cache_desc, cache_keys)
""",
    ),
    Fragment(
        "deallocate_cache",
        "",
        """
from llm_datadist import *
...
cache_manager.deallocate_cache(cache)
""",
    ),
    Fragment(
        "remove_cache_key",
        "",
        """
from llm_datadist import *
...
cache_keys = [CacheKey(1, req_id=1), CacheKey(1, req_id=2)]
cache_manager.remove_cache_key(cache_keys[0])
cache_manager.remove_cache_key(cache_keys[1])
""",
    ),
    Fragment(
        "copy_cache",
        """
dst_cache = cache_manager.allocate_cache(cache_desc)
src_cache = cache_manager.allocate_cache(cache_desc)
""",
        """
from llm_datadist import *
...
cache_manager.copy_cache(dst_cache, src_cache, 0, 1, 0, 128)
""",
    ),
    Fragment(
        "allocate_blocks_cache",
        "",
        """
from llm_datadist import *
...
blocks_cache_key = BlocksCacheKey(1, 0)
blocks_cache = cache_manager.allocate_blocks_cache(cache_desc, blocks_cache_key)
""",
    ),
    Fragment(
        # The document prints allocate_cache's text under this heading once more; its keys have been
        # removed above, so they can be given again.
        "deallocate_blocks_cache",
        "cache_manager.deallocate_blocks_cache(blocks_cache)",
        """
from llm_datadist import *
...
cache_desc = CacheDesc(1, [2, 1024 * 1024], DataType.DT_FLOAT16)
cache_keys = [CacheKey(1, req_id=1), CacheKey(1, req_id=2)]
cache = cache_manager.allocate_cache(cache_desc, cache_keys)
""",
    ),
    Fragment(
        "copy_blocks",
        "cache = cache_manager.allocate_blocks_cache(CacheDesc(2, [8, 64], DataType.DT_FLOAT16))",
        """
cache_manager.copy_blocks(cache, {1: [2,3]})
""",
    ),
    Fragment(
        "swap_blocks",
        """
import ctypes
npu_cache_desc = CacheDesc(2, [8, 64], DataType.DT_FLOAT16)
npu_cache_key = BlocksCacheKey(1, 7)
cpu_cache_desc = CacheDesc(2, [8, 64], DataType.DT_FLOAT16, Placement.HOST)
cpu_tensors = [ctypes.create_string_buffer(1024) for _ in range(2)]
cpu_addrs = [ctypes.addressof(tensor) for tensor in cpu_tensors]
""",
        """
from llm_datadist import Cache
npu_cache = cache_manager.allocate_blocks_cache(npu_cache_desc, npu_cache_key)
cpu_cache = Cache.create_cpu_cache(cpu_cache_desc, cpu_addrs)
# swap in
cache_manager.swap_blocks(cpu_cache, npu_cache, {1:2, 3:4})
# swap out
cache_manager.swap_blocks(npu_cache, cpu_cache, {1:2, 3:4})
""",
    ),
    Fragment(
        "mem_pool_cfg",
        "",
        """
from llm_datadist import LLMConfig
llm_config = LLMConfig()
llm_config.mem_pool_cfg= "{\\"memory_size\\": 18737418240, \\"page_shift\\": 16}"
""",
    ),
    Fragment(
        "host_mem_pool_cfg",
        "",
        """
from llm_datadist import LLMConfig
llm_config = LLMConfig()
llm_config.host_mem_pool_cfg= "{\\"memory_size\\": 18737418240, \\"page_shift\\": 16}"
""",
    ),
]
END = """
assert llm_config.generate_options().keys() == {"llm.HostMemPoolConfig"}
cache_manager.check_integrity()
datadist.finalize()
"""


def test_every_fragment_runs():
    program = "".join(f"{one.prelude}\n{one.code}\nprint({one.heading!r})\n" for one in FRAGMENTS)
    said = run_python("-c", program + END).stdout
    assert said.split() == [one.heading for one in FRAGMENTS]
