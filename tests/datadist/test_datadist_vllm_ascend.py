"""The calls that vllm-ascend's connector makes, in its order, on tensors of an elastic KV cache.

A prefill and a decode worker each: an alias'd import, init with the connector's options, the KV
cache's tensors registered by address, a group of two linked by a rank table, the status polled,
blocks pulled by the other's key, the group unlinked.
"""

from __future__ import annotations

import json
from pathlib import Path

import needs
import pytest
from processes import LineProgram, run_python

pytestmark = [pytest.mark.slow, needs.torch]

WORKER = r"""
import json, sys, threading
import torch
import llm_datadist
from llm_datadist import BlocksCacheKey, CacheDesc, LLMConfig, LLMDataDist, LLMException, LLMRole
from kvelastic.integration.vllm import interfaces as kv

role, own, other, mla = json.loads(sys.argv[1])
role = LLMRole.PROMPT if role == "kv_producer" else LLMRole.DECODER

datadist = LLMDataDist(role, own)
config = LLMConfig()
config.device_id = 0
config.sync_kv_timeout = 300_000
config.enable_switch_role = True
config.enable_cache_manager = True
config.enable_remote_cache_accessible = True
datadist.init(config.generate_options())
manager = datadist.cache_manager

# The engine's KV cache: elastic, and blocks have memory only while they are allocated.
kv.init_kvcached(device="cpu")
LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 64, 16, 2, 32
tensors = kv.alloc_kv_cache((2, BLOCKS, TOKENS, HEADS, DIM), TOKENS, torch.float16, "cpu", LAYERS)
pool = kv.get_kv_cache_manager(BLOCKS, TOKENS, HEADS * DIM * 2, LAYERS)
ids = pool.alloc(8)

def say(value):
    print(json.dumps(value), flush=True)

def hear():
    return json.loads(sys.stdin.readline())

addrs, views = [], []
for layer in tensors:
    for view in (layer[0], layer[1]):
        addrs.append(view.data_ptr())
        views.append(view)
dtype = {torch.float16: llm_datadist.DataType.DT_FLOAT16}[views[0].dtype]
# Blocks of a buffer lie side by side; ids of unmapped pages are never handed out.
span = max(ids) + 1
desc = CacheDesc(len(addrs), [span, TOKENS, HEADS, DIM], dtype)
try:
    if mla:
        caches = [
            manager.register_blocks_cache(
                CacheDesc(LAYERS, [span, TOKENS, HEADS, DIM], dtype), addrs[at::2],
                BlocksCacheKey(cluster_id=own, model_id=at))
            for at in range(2)
        ]
    else:
        caches = [manager.register_blocks_cache(desc, addrs, BlocksCacheKey(cluster_id=own))]
except (TypeError, ValueError) as error:
    raise RuntimeError(f"Passing unexpected parameter: {error}")

prefill, decode = (own, other) if role is LLMRole.PROMPT else (other, own)
table = {
    "version": "1.2", "server_count": "1", "status": "completed",
    "server_list": [{"server_id": "10.1.1.1", "device": [
        {"device_id": "0", "device_ip": "192.168.0.1", "rank_id": "0"},
        {"device_id": "1", "device_ip": "192.168.0.2", "rank_id": "1"}]}],
}
comm = datadist.link("pd_comm_192.168.0.1_192.168.0.2", {prefill: 0, decode: 1}, json.dumps(table))
pause = threading.Event()
while True:
    status = datadist.query_register_mem_status(comm_id=comm)
    if status == llm_datadist.RegisterMemStatus.OK:
        break
    assert status != llm_datadist.RegisterMemStatus.FAILED
    pause.wait(0.01)

if role is LLMRole.PROMPT:
    for at, view in enumerate(views):
        for block in ids:
            view[block] = at * 100 + block
    say(ids)
    hear()  # the decoder has pulled, and says that the request has finished
    pool.free(ids)
    pool.trim()
    say("freed")
    hear()
else:
    remote = hear()
    for at, cache in enumerate(caches):
        key = BlocksCacheKey(cluster_id=other)
        if mla:
            key = BlocksCacheKey(cluster_id=other, model_id=at)
        manager.pull_blocks(key, cache, remote, ids)
    good = all(
        (view[mine] == at * 100 + theirs).all().item()
        for at, view in enumerate(views) for theirs, mine in zip(remote, ids)
    )
    say(good)
    hear()
    # The prefill worker has given its blocks back: what is pulled now is refused, not read.
    try:
        key = BlocksCacheKey(cluster_id=other)
        manager.pull_blocks(key, caches[0], remote, ids)
        say("pulled")
    except LLMException as error:
        say(error.status_code.name)
datadist.unlink(comm)
datadist.finalize()
kv.shutdown_kvcached()
"""


class Worker(LineProgram):
    def __init__(self, *arguments: object) -> None:
        alias = {"KVELASTIC_LLM_DATADIST_ALIAS": "true"}
        super().__init__("-c", WORKER, json.dumps(arguments), environment=alias)

    def hear(self) -> object:
        return json.loads(self.read())

    def say(self, value: object) -> None:
        self.send(json.dumps(value))


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
def test_vllm_ascend_connector_calls_replay(mla):
    with (
        Worker("kv_producer", 1, 2, mla) as prefill,
        Worker("kv_consumer", 2, 1, mla) as decode,
    ):
        decode.say(prefill.hear())
        assert decode.hear() is True
        prefill.say("finished")
        assert prefill.hear() == "freed"
        decode.say("again")
        assert decode.hear() == "LLM_PARAM_INVALID"
        prefill.say("end")
        assert (prefill.finish(), decode.finish()) == (0, 0)


def test_two_process_example_runs():
    example = Path(__file__).parents[2] / "examples/datadist_two_processes.py"
    said = run_python(example).stdout
    assert [line.split()[-4:] for line in said.splitlines() if "decoder" in line] == [
        ["[10,", "11,", "12,", "13]"],
        ["[20,", "21,", "22,", "23]"],
    ]
