"""Copies between caches of one process, and what caches refuse."""

from __future__ import annotations

import ctypes
import gc
import mmap

import pytest
from datadist_local import (
    CallersMemory,
    first_manager,
    local_manager,
    read,
    second_options,
    write,
)

from kvelastic.datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from kvelastic.datadist.status import LLMParamError

S = LLMStatusCode
MIB = 1 << 20
POOL = 64 * MIB


@pytest.fixture
def manager():
    made, caches = local_manager(second_options(POOL, POOL))
    yield made
    caches.check_integrity()
    caches.close()


def desc(tensors=2, rows=4, row=64, placement=Placement.DEVICE, dtype=DataType.DT_INT8):
    return CacheDesc(tensors, [rows, row], dtype, placement)


def fill(cache, rows=4, row=64):
    for tensor in range(cache.cache_desc.num_tensors):
        for at in range(rows):
            write(cache, tensor, at * row, bytes([16 * tensor + at]) * row)


def status(call, *args, **kwargs):
    with pytest.raises(LLMException) as failed:
        call(*args, **kwargs)
    return failed.value.status_code


def test_copy_whole_and_partial_rows(manager):
    one, other = manager.allocate_cache(desc()), manager.allocate_cache(desc(rows=2))
    fill(one)
    manager.copy_cache(other, one, 1, 3)
    assert read(other, 0, 64, 64) == bytes([3]) * 64
    assert read(other, 1, 64, 64) == bytes([19]) * 64
    write(other, 0, 0, bytes(64))
    manager.copy_cache(other, one, 0, 2, 8, 4)
    assert read(other, 0, 0, 64) == bytes(8) + bytes([2]) * 4 + bytes(52)
    assert read(other, 0, 64, 64) == bytes([3]) * 64


def test_copy_from_device_to_host(manager):
    device = manager.allocate_cache(desc())
    host = manager.allocate_cache(desc(placement=Placement.HOST))
    fill(device)
    manager.copy_cache(host, device, 0, 2)
    assert read(host, 1, 0, 64) == bytes([18]) * 64


@pytest.mark.parametrize(
    "arguments",
    [
        {"dst_batch_index": 4},
        {"src_batch_index": 4},
        {"offset": 60, "size": 5},
        {"offset": 64},
        {"size": 0},
        {"size": -2},
        {"offset": -1},
    ],
)
def test_copy_outside_a_row_is_refused(manager, arguments):
    cache = manager.allocate_cache(desc())
    assert status(manager.copy_cache, cache, cache, **arguments) is S.LLM_PARAM_INVALID


def test_copy_between_mismatched_caches_is_refused(manager):
    cache = manager.allocate_cache(desc())
    for other in (desc(tensors=3), desc(row=32), desc(row=32, dtype=DataType.DT_FLOAT16)):
        assert (
            status(manager.copy_cache, manager.allocate_cache(other), cache) is S.LLM_PARAM_INVALID
        )
    blocks = manager.allocate_blocks_cache(desc())
    assert status(manager.copy_cache, blocks, cache) is S.LLM_PARAM_INVALID


def test_copy_blocks_to_several_targets(manager):
    cache = manager.allocate_blocks_cache(desc(rows=6))
    fill(cache, rows=6)
    manager.copy_blocks(cache, {1: [2, 3], 0: [5]})
    assert [read(cache, 1, at * 64, 1)[0] for at in range(6)] == [16, 17, 17, 17, 20, 16]
    for wrong in ({1: [2], 2: [3]}, {1: [2, 2]}, {6: [1]}, {1: [6]}, {1: [-1]}, {1: []}):
        assert status(manager.copy_blocks, cache, wrong) is S.LLM_PARAM_INVALID
    manager.copy_blocks(cache, {})
    with pytest.raises(TypeError):
        manager.copy_blocks(cache, {1: 2})
    with pytest.raises(TypeError):
        manager.copy_blocks(cache, [1])
    assert (
        status(manager.copy_blocks, manager.allocate_cache(desc()), {1: [2]}) is S.LLM_PARAM_INVALID
    )


def test_blocks_swap_out_and_in(manager):
    device = manager.allocate_blocks_cache(desc(rows=6))
    memory = CallersMemory(2, 6 * 64)
    cpu = Cache.create_cpu_cache(desc(rows=6, placement=Placement.HOST), memory.addresses)
    fill(device, rows=6)
    manager.swap_blocks(device, cpu, {1: 2, 2: 3, 3: 1})
    assert [read(cpu, 1, at * 64, 64) for at in (2, 3, 1)] == [
        bytes([n]) * 64 for n in (17, 18, 19)
    ]
    manager.swap_blocks(cpu, device, {2: 5})
    assert read(device, 0, 5 * 64, 64) == bytes([1]) * 64
    assert read(device, 0, 4 * 64, 64) == bytes([4]) * 64


def test_swap_needs_one_host_and_one_device_cache(manager):
    device = manager.allocate_blocks_cache(desc())
    rows = manager.allocate_cache(desc(placement=Placement.HOST))
    small = manager.allocate_blocks_cache(desc(row=32, placement=Placement.HOST))
    assert status(manager.swap_blocks, device, device, {1: 2}) is S.LLM_PARAM_INVALID
    for other in (rows, small):
        with pytest.raises(ValueError, match=r"no blocks cache|do not match"):
            manager.swap_blocks(device, other, {1: 2})
    for arguments in ((None, device, {}), (device, None, {}), (device, small, None)):
        with pytest.raises(AttributeError):
            manager.swap_blocks(*arguments)
    with pytest.raises(TypeError):
        manager.swap_blocks(device, small, [1])
    for wrong in ({4: 0}, {0: 4}, {-1: 0}, {0: 1, 1: 1}):
        host = manager.allocate_blocks_cache(desc(placement=Placement.HOST))
        assert status(manager.swap_blocks, device, host, wrong) is S.LLM_PARAM_INVALID


@pytest.mark.slow
def test_swap_with_unmapped_memory_returns_error(manager):
    region = mmap.mmap(-1, 4 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    gone = manager.register_blocks_cache(
        desc(tensors=1, rows=4, row=MIB, placement=Placement.HOST), [address]
    )
    device = manager.allocate_blocks_cache(desc(tensors=1, rows=4, row=MIB))
    manager.swap_blocks(gone, device, {0: 0})
    gc.collect()
    libc = ctypes.CDLL(None)
    protect = libc.mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(address + MIB, MIB, 0) == 0
    assert status(manager.swap_blocks, gone, device, {1: 1}) is S.LLM_PARAM_INVALID
    assert status(manager.swap_blocks, device, gone, {1: 1}) is S.LLM_PARAM_INVALID
    manager.swap_blocks(gone, device, {2: 2})
    assert protect(address + MIB, MIB, 3) == 0


def test_allocation_needs_a_pool_and_respects_its_size():
    manager, caches = local_manager(second_options(8 * MIB))
    big = CacheDesc(4, [MIB], DataType.DT_FLOAT)
    assert status(manager.allocate_cache, big) is S.LLM_OUT_OF_MEMORY
    whole = manager.allocate_cache(CacheDesc(2, [MIB], DataType.DT_FLOAT))  # all of the 8 MiB
    assert status(manager.allocate_cache, desc()) is S.LLM_OUT_OF_MEMORY
    host = desc(placement=Placement.HOST)
    assert status(manager.allocate_cache, host) is S.LLM_FEATURE_NOT_ENABLED
    manager.deallocate_cache(whole)
    manager.allocate_cache(desc())
    caches.close()
    manager, caches = local_manager(second_options())
    assert status(manager.allocate_cache, desc()) is S.LLM_FEATURE_NOT_ENABLED
    caches.close()


def test_limit_and_sleep_apply_to_the_pool():
    manager, caches = local_manager(second_options(16 * MIB))
    (memory,) = caches.pools
    cache = manager.allocate_cache(CacheDesc(1, [4 * MIB], DataType.DT_INT8))
    memory.pool.blocks.set_limit(6 * MIB)
    assert status(manager.allocate_cache, desc()) is S.LLM_OUT_OF_MEMORY
    memory.pool.blocks.set_limit(8 * MIB)
    other = manager.allocate_cache(desc())
    manager.deallocate_cache(cache)
    manager.deallocate_cache(other)
    memory.pool.blocks.sleep()
    assert memory.pool.blocks.mapped_bytes == 0
    assert status(manager.allocate_cache, desc()) is S.LLM_OUT_OF_MEMORY
    memory.pool.blocks.wake()
    manager.allocate_cache(desc())
    caches.close()


def test_register_cache_checks_its_addresses(manager):
    memory = CallersMemory(200, 256)
    kept = manager.register_cache(desc(tensors=200), memory.addresses)
    few = CallersMemory(41, 256)
    assert status(manager.register_cache, desc(tensors=41), few.addresses) is S.LLM_PARAM_INVALID
    assert status(manager.register_cache, desc(), few.addresses[:1]) is S.LLM_PARAM_INVALID
    with pytest.raises(ValueError, match="addrs"):
        manager.register_cache(desc(), [few.addresses[0], 0])
    with pytest.raises(AttributeError):
        manager.register_cache(None, few.addresses)
    manager.deallocate_cache(kept)
    assert kept.tensor_addrs == memory.addresses  # registered caches are left as they are
    manager.unregister_cache(kept.cache_id)
    manager.unregister_cache(kept.cache_id)
    assert status(manager.copy_cache, kept, kept) is S.LLM_KV_CACHE_NOT_EXIST
    manager.register_cache(desc(tensors=41), few.addresses)
    allocated = manager.allocate_cache(desc())
    assert status(manager.unregister_cache, allocated.cache_id) is S.LLM_PARAM_INVALID


def test_duplicate_keys_are_refused(manager):
    manager.allocate_cache(desc(), [CacheKey(1, 7)])
    assert status(manager.allocate_cache, desc(), [CacheKey(1, 7)]) is S.LLM_PARAM_INVALID
    manager.allocate_cache(desc(), [CacheKey(1, 7, model_id=1)])
    prefix = CacheKey(1, 2**64 - 1, prefix_id=7)
    manager.allocate_cache(desc(), [prefix])
    assert status(manager.allocate_cache, desc(), [prefix]) is S.LLM_PREFIX_ALREADY_EXIST
    manager.allocate_blocks_cache(desc(), BlocksCacheKey(1))
    assert status(manager.allocate_blocks_cache, desc(), BlocksCacheKey(1)) is S.LLM_PARAM_INVALID


def test_each_cache_kind_has_its_own_deallocation(manager):
    blocks, rows = manager.allocate_blocks_cache(desc()), manager.allocate_cache(desc())
    assert status(manager.deallocate_cache, blocks) is S.LLM_PARAM_INVALID
    assert status(manager.deallocate_blocks_cache, rows) is S.LLM_PARAM_INVALID
    for _ in range(2):
        manager.deallocate_blocks_cache(blocks)
        manager.deallocate_cache(rows)
    assert status(manager.copy_blocks, blocks, {1: [2]}) is S.LLM_KV_CACHE_NOT_EXIST


def test_wrong_types_are_type_errors(manager):
    cache = manager.allocate_cache(desc())
    memory = CallersMemory(2, 256)
    cpu = KvCache.create_cpu_cache(desc(placement=Placement.HOST), memory.addresses)
    for call, arguments in [
        (manager.allocate_cache, (1,)),
        (manager.allocate_cache, (desc(), CacheKey(1, 1))),
        (manager.allocate_cache, (desc(), [1])),
        (manager.allocate_blocks_cache, (desc(), CacheKey(1, 1))),
        (manager.deallocate_cache, (None,)),
        (manager.deallocate_cache, (cpu,)),
        (manager.remove_cache_key, (1,)),
        (manager.copy_cache, (cache, cpu)),
        (manager.copy_cache, (cache, cache, "0")),
        (manager.copy_cache, (cache, cache, True)),
        (manager.copy_cache, (cache, cache, 0, 0, 0, 1.0)),
        (manager.unregister_cache, ("1",)),
        (manager.register_cache, (desc(), [1.5, 2])),
        (manager.pull_cache, (BlocksCacheKey(1), cache)),
        (manager.pull_blocks, (1, cache)),
        (manager.transfer_cache_async, (cache, 1, [])),
        (manager.remap_registered_memory, (1,)),
    ]:
        with pytest.raises(TypeError):
            call(*arguments)


def test_calls_after_finalize_are_refused(manager):
    cache = manager.allocate_cache(desc())
    manager.finalize()
    assert status(manager.allocate_cache, desc()) is S.LLM_ENGINE_FINALIZED
    assert status(manager.copy_cache, cache, cache) is S.LLM_ENGINE_FINALIZED


# ------------------------------------------------------------------------------ first generation


@pytest.fixture
def first():
    made, caches = first_manager({"ge.exec.deviceId": "0", "ge.flowGraphMemMaxSize": str(POOL)})
    made.caches = caches
    yield made
    caches.check_integrity()
    caches.close()


def test_deleted_handle_drops_its_reference(first):
    (memory,) = first.caches.pools
    cache = first.allocate_cache(desc())
    keyed = first.allocate_cache(desc(), [CacheKey(1, 1)])
    assert memory.pool.blocks.stats()["blocks_used"] == 2
    del cache, keyed
    gc.collect()
    assert memory.pool.blocks.stats()["blocks_used"] == 1
    first.remove_cache_key(CacheKey(1, 1))
    assert memory.pool.blocks.stats()["blocks_used"] == 0


def test_handle_deleted_during_a_call_is_freed_later(first):
    """The collector may run anywhere, also in a thread that holds the table's lock."""
    cache = first.allocate_cache(desc())
    with first.caches._lock:
        del cache
        gc.collect()
    (memory,) = first.caches.pools
    assert memory.pool.blocks.stats()["blocks_used"] == 1
    other = first.allocate_cache(desc())
    assert memory.pool.blocks.stats()["blocks_used"] == 1
    first.deallocate_cache(other)


def test_handle_outliving_its_manager_frees_nothing():
    manager, caches = first_manager({"ge.exec.deviceId": "0"})
    cache = manager.allocate_cache(desc())
    caches.close()
    cache.__del__()  # what the collector would call, but for the warning


def test_tensors_are_host_copies(first):
    np = pytest.importorskip("numpy")
    cache = first.allocate_cache(CacheDesc(2, [2, 3], DataType.DT_FLOAT))
    write(cache, 1, 0, np.arange(6, dtype=np.float32).tobytes())
    (tensor,) = first.get_cache_tensors(cache, 1)
    assert tensor.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    write(cache, 1, 0, bytes(24))
    assert tensor.numpy()[1, 2] == 5
    bf16 = first.allocate_cache(CacheDesc(1, [2, 2], DataType.DT_BF16))
    write(bf16, 0, 0, np.array([0x3F80, 0xC040, 0x0001, 0x7F80], dtype=np.uint16).tobytes())
    values = first.get_cache_tensors(bf16)[0].numpy()
    assert values.dtype == np.float32
    assert values.tolist() == [[1.0, -3.0], [2.0**-133, float("inf")]]
    with pytest.raises(ValueError, match="tensor_index"):
        first.get_cache_tensors(cache, 2)


def test_each_device_has_its_own_copy():
    manager, caches = first_manager({"ge.exec.deviceId": "0;1"})
    cache = manager.allocate_cache(desc())
    assert len(cache.per_device_tensor_addrs) == 2
    for device in range(2):
        write(cache, 0, 0, bytes([device + 1]) * 64, device)
    other = manager.allocate_cache(desc())
    manager.copy_cache(other, cache)
    assert [read(other, 0, 0, 1, device)[0] for device in range(2)] == [1, 2]
    assert len(manager.get_cache_tensors(cache)) == 2
    memory = CallersMemory(4, 256)
    host = desc(placement=Placement.HOST)
    cpu = KvCache.create_cpu_cache(host, [memory.addresses[:2], memory.addresses[2:]])
    blocks = manager.allocate_blocks_cache(desc())
    manager.swap_blocks(blocks, cpu, {0: 1})
    one = KvCache.create_cpu_cache(host, memory.addresses[:2])
    assert status(manager.swap_blocks, blocks, one, {0: 1}) is S.LLM_PARAM_INVALID
    caches.check_integrity()
    caches.close()


def test_memory_utilization_and_size_classes():
    options = {
        "ge.exec.deviceId": "0",
        "ge.flowGraphMemMaxSize": str(20 * MIB),
        "llm.MemoryUtilization": "0.5",
        "llm.BufPoolCfg": '{"buf_cfg": [{"total_size": 4194304, "blk_size": 256,'
        ' "max_buf_size": 65536}]}',
    }
    manager, caches = first_manager(options)
    small = CacheDesc(32, [256], DataType.DT_FLOAT)  # 32 KiB in the size class of 4 MiB
    kept = [manager.allocate_cache(small) for _ in range(4)]
    assert kept[0].per_device_tensor_addrs[0][1] - kept[0].per_device_tensor_addrs[0][0] == 1024
    assert status(manager.allocate_cache, CacheDesc(1, [11 * MIB], DataType.DT_INT8)) is (
        S.LLM_DEVICE_OUT_OF_MEMORY
    )
    wide = CacheDesc(65, [64 << 10], DataType.DT_INT8)  # more than the class may have
    assert status(manager.allocate_cache, wide) is S.LLM_DEVICE_OUT_OF_MEMORY
    caches.check_integrity()
    caches.close()


def test_roles_of_the_first_generation(first):
    cache = first.allocate_cache(desc())
    assert status(first.pull_cache, CacheKey(1, 1), cache) is S.LLM_PARAM_INVALID
    first.switch_role(LLMRole.DECODER)
    assert status(first.remove_cache_key, CacheKey(1, 1)) is S.LLM_PARAM_INVALID
    assert status(first.allocate_cache, desc(), [CacheKey(1, 1)]) is S.LLM_PARAM_INVALID
    blocks_key = BlocksCacheKey(prompt_cluster_id=1)
    assert status(first.allocate_blocks_cache, desc(), blocks_key) is S.LLM_PARAM_INVALID
    assert status(first.pull_cache, CacheKey(1, 1), cache) is S.LLM_NOT_YET_LINK
    with pytest.raises(LLMParamError):
        first.allocate_cache(desc(placement=Placement.HOST))
    with pytest.raises(LLMParamError, match="exactly one"):
        first.pull_cache(CacheKey(1, 2**64 - 1), cache)
