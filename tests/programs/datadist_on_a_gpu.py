"""Datadist's caches on a GPU whose memory the processor cannot read: `datadist_on_a_gpu.py CASE`.

The GPU is `libcuda.so.1` of whoever runs this; bytes are written and read by its own copies.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

from datadist_local import local_manager, read, second_options, write
from gpu_kernels import SUCCESS, Gpu
from waiting import DEADLINE_S, wait_until

from kvelastic.datadist import CacheDesc, DataType, Placement
from kvelastic.datadist.caches import CacheHandle
from kvelastic.datadist.local_caches import LocalCaches
from kvelastic.datadist.managers import CacheManager

MIB = 1 << 20
POOL = 64 * MIB
ROW = 4096
SECOND_GPU = 1


def opened(device: int = 0) -> tuple[CacheManager, LocalCaches]:
    return local_manager(second_options(POOL, POOL, **{"ge.exec.deviceId": str(device)}))


def desc(placement: Placement = Placement.DEVICE, rows: int = 4, row: int = ROW) -> CacheDesc:
    return CacheDesc(2, [rows, row], DataType.DT_INT8, placement)


def put(gpu: Gpu, cache: CacheHandle, tensor: int, data: bytes) -> None:
    address = ctypes.c_uint64(cache.device_addrs[0][tensor])
    assert gpu.sim.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(len(data))) == SUCCESS


def got(gpu: Gpu, cache: CacheHandle, tensor: int, size: int) -> bytes:
    back = ctypes.create_string_buffer(size)
    address = ctypes.c_uint64(cache.device_addrs[0][tensor])
    assert gpu.sim.cuMemcpyDtoH_v2(back, address, ctypes.c_size_t(size)) == SUCCESS
    return back.raw


def case_deallocated_memory_is_released() -> None:
    """By a limit, by trim and at the end."""
    manager, caches = opened()
    blocks = next(iter(caches.pools)).pool.blocks
    for give in (lambda: blocks.set_limit(4 * MIB), blocks.trim):
        blocks.set_limit(POOL)
        cache = manager.allocate_cache(desc(row=8 * MIB // 4))
        assert blocks.mapped_bytes >= 16 * MIB
        manager.deallocate_cache(cache)
        give()
        wait_until(lambda: blocks.mapped_bytes <= 4 * MIB, "memory stays mapped")
    caches.check_integrity()
    caches.close()


def case_page_stays_until_its_kernel_ends() -> None:
    """A kernel of the default stream still reads a cache that is deallocated."""
    gpu = Gpu()
    manager, caches = opened()
    blocks = next(iter(caches.pools)).pool.blocks
    cache = manager.allocate_cache(desc(row=8 * MIB // 4))
    default = 0
    gpu.hold(default)
    gpu.read(cache.device_addrs[0][0], 8 * MIB, default)
    manager.deallocate_cache(cache)
    asked = gpu.count("cuEventQuery")
    shrinking = threading.Thread(target=blocks.trim)
    shrinking.start()
    wait_until(lambda: gpu.count("cuEventQuery") > asked, "it does not look at the stream")
    assert blocks.mapped_bytes >= 16 * MIB
    gpu.release(default)
    shrinking.join(DEADLINE_S)
    wait_until(lambda: blocks.mapped_bytes <= 4 * MIB, "memory stays mapped")
    assert gpu.error() == SUCCESS, "a page went from under a kernel"
    caches.close()


def case_copy_is_synchronous() -> None:
    """Also of what a kernel of the default stream is still to write."""
    gpu = Gpu()
    manager, caches = opened()
    one, other = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    default = ctypes.c_void_p(0)
    gpu.hold(0)
    at = ctypes.c_uint64(one.device_addrs[0][1])
    assert gpu.sim.cuMemsetD8Async(at, 7, ctypes.c_size_t(ROW), default) == SUCCESS
    asked = gpu.count("cuEventQuery")
    copying = threading.Thread(target=manager.copy_cache, args=(other, one, 2, 0))
    copying.start()
    wait_until(
        lambda: gpu.count("cuEventQuery") > asked or not copying.is_alive(), "it does not wait"
    )
    assert copying.is_alive(), "the copy has returned before the kernel has written"
    gpu.release(0)
    copying.join(DEADLINE_S)
    assert got(gpu, other, 1, 3 * ROW)[2 * ROW :] == bytes([7]) * ROW
    caches.check_integrity()
    caches.close()


def case_copy_to_host_and_back() -> None:
    gpu = Gpu()
    manager, caches = opened()
    device = manager.allocate_cache(desc())
    host = manager.allocate_cache(desc(Placement.HOST))
    data = os.urandom(4 * ROW)
    put(gpu, device, 1, data)
    manager.copy_cache(host, device, 1, 3)
    assert read(host, 1, ROW, ROW) == data[3 * ROW :]
    write(host, 0, 0, data[:ROW])
    manager.copy_cache(device, host, 0, 0)
    assert got(gpu, device, 0, ROW) == data[:ROW]
    assert got(gpu, device, 1, 4 * ROW)[3 * ROW :] == data[3 * ROW :]
    caches.close()


def case_copy_keeps_a_capture_valid() -> None:
    """A CUDA graph is captured in a stream that waits for the default one; the copy ends it not."""
    blocking = 0
    gpu = Gpu(blocking)
    manager, caches = opened()
    one, other = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    data = os.urandom(ROW)
    put(gpu, one, 0, data)
    gpu.begin_capture()
    manager.copy_cache(other, one)
    assert gpu.end_capture() == SUCCESS, "the copy has ended the capture"
    assert got(gpu, other, 0, ROW) == data
    caches.close()


def case_second_gpu_needs_no_context_on_first() -> None:
    """Caches of the second GPU need no context on the first."""
    manager, caches = opened(SECOND_GPU)
    one, other = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    manager.copy_cache(other, one)
    sim = ctypes.CDLL("libcuda.so.1")
    sim.kvsim_process_bytes.restype = ctypes.c_uint64
    assert sim.kvsim_process_bytes(SECOND_GPU, os.getpid()) > 0
    assert sim.kvsim_process_bytes(0, os.getpid()) == 0
    caches.close()


if __name__ == "__main__":
    globals()[f"case_{sys.argv[1]}"]()
    print("passed", flush=True)
    os._exit(0)  # a thread that waits for ever must not keep a failed run
