"""Kernels and captures beside a range of this process: `gpu_cases.py CASE` (test_kernels.py)."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable

import pytest
from gpu_kernels import GLOBAL, SUCCESS, THREAD_LOCAL, Gpu
from native_pools import HUGE, LAYOUTS

from kvelastic import _vmm, errors
from kvelastic.pool.pool import native_geometry
from kvelastic.shared import segment

PAGES = 24
B = 8


def reserve(gpu: Gpu) -> _vmm.Range:
    return _vmm.Range.reserve(gpu.driver, native_geometry(LAYOUTS["paged"], PAGES))


def pool_over(memory: _vmm.Range) -> _vmm.Pool:
    total = PAGES * HUGE
    return _vmm.Pool(
        memory, max_blocks=PAGES * B, limit_bytes=total, capacity_bytes=total,
        preallocate=False, movable=True,
    )  # fmt: skip


def begun(gpu: Gpu, call: Callable[[], object]) -> threading.Thread:
    """The call in another thread; returns when it waits for a fence."""
    before = gpu.count("cuEventQuery")
    thread = threading.Thread(target=call)
    thread.start()
    while gpu.count("cuEventQuery") == before:
        assert thread.is_alive(), "it did not wait"
    return thread


def case_alloc_continues_while_an_unmap_waits(gpu: Gpu) -> None:
    gpu.driver.use_streams([gpu.stream])
    memory = reserve(gpu)
    pool = pool_over(memory)
    ids = pool.alloc(4 * B - 1) or []
    pool.cache(ids[:5])
    pool.free(ids[5:])
    calls: list[Callable[[], object]] = [pool.trim, lambda: pool.set_limit(2 * HUGE)]
    for waits in calls:
        pool.free(pool.alloc(6 * B) or [])
        gpu.hold()
        for page in filter(memory.is_mapped, range(PAGES)):
            gpu.read(memory.address + page * HUGE, HUGE)
        thread = begun(gpu, waits)
        pool.set_limit(PAGES * HUGE)
        got = pool.alloc(2 * B)
        assert got is not None
        assert thread.is_alive()
        pool.free(got)
        gpu.release()
        thread.join()
        assert gpu.error() == SUCCESS
        pool.check_integrity()
        memory.check_integrity()


def case_alloc_continues_while_a_move_waits(gpu: Gpu) -> None:
    gpu.driver.use_streams([gpu.stream])
    memory = reserve(gpu)
    pool = pool_over(memory)
    ids = pool.alloc(3 * B - 1) or []
    by_page = [[i for i in ids if LAYOUTS["paged"].page_of(i) == page] for page in range(3)]
    pool.cache(by_page[2][:2])
    pool.free(by_page[2][2:] + by_page[0][:3])  # the holes for them are on page 0
    gpu.hold()
    gpu.read(memory.address, 3 * HUGE)
    thread = begun(gpu, pool.compact)
    assert len(pool.alloc(3 * B) or []) == 3 * B
    assert thread.is_alive()
    gpu.release()
    thread.join()
    assert gpu.error() == SUCCESS
    pool.check_integrity()


def case_pages_used_by_kernels_stay_mapped(gpu: Gpu) -> None:
    """Threads alloc, read and free beside limits, moves, sleep, kernels and maintenance."""
    gpu.driver.use_streams([gpu.stream])
    memory = reserve(gpu)
    pool = pool_over(memory)
    ended = threading.Event()
    failures: list[str] = []
    queued: list[int] = []

    def engine(seed: int) -> None:
        chance = random.Random(seed)
        gpu.enter()
        mine: list[int] = []
        for _ in range(400):
            mine += pool.alloc(chance.randint(1, 20)) or []
            for block in mine[:3]:
                page = LAYOUTS["paged"].page_of(block)
                gpu.read(memory.address + page * HUGE, HUGE)
                queued.append(page)
            chance.shuffle(mine)
            cut = chance.randint(0, len(mine))
            back, mine = mine[:cut], mine[cut:]
            (pool.free if chance.random() < 0.5 else pool.cache)(back)
            pool.take_changes()
        pool.free(mine)

    def operator(seed: int) -> None:
        chance = random.Random(seed)
        while not ended.is_set():
            calls: list[Callable[[], object]] = [pool.trim, pool.compact, pool.sleep, pool.wake]
            calls += 3 * [lambda: pool.set_limit(chance.randint(2, PAGES) * HUGE)]
            chance.choice(calls)()
            pool.wake()

    def kernels() -> None:
        while not ended.is_set():
            gpu.hold()
            asked, full = gpu.count("cuEventQuery"), len(queued) + 500
            # A held stream with a full queue (1,024) would block those who are to look at events.
            while not ended.is_set() and gpu.count("cuEventQuery") < asked + 3:
                if len(queued) >= full:
                    break
            gpu.release()

    def noted(work: Callable[..., None], *arguments: int) -> threading.Thread:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException:
                failures.append(traceback.format_exc())

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    name = f"kvtest_kernels_{os.getpid()}"
    with segment.create(name, engine="test", device="cuda") as shared:
        maintenance = _vmm.MaintenanceThread.start(pool, shared.control_block, 0.01)
        engines = [noted(engine, seed) for seed in range(2)]
        others = [noted(operator, 7), noted(operator, 8), noted(kernels)]
        for thread in engines:
            thread.join()
        ended.set()
        for thread in others:
            thread.join()
        maintenance.stop()
    assert not failures, failures[0]
    assert gpu.error() == SUCCESS
    assert gpu.count("cuMemUnmap") > 0
    pool.check_integrity()
    memory.check_integrity()


def case_unregistered_non_blocking_stream_is_not_fenced(gpu: Gpu) -> None:
    """Where only the default stream is named, a kernel in a non-blocking one is not seen."""
    memory = reserve(gpu)
    memory.map([0, 1])
    gpu.driver.use_streams([gpu.stream])
    gpu.hold()
    gpu.read(memory.address + HUGE, HUGE)
    thread = begun(gpu, lambda: memory.unmap([1], destroy=True))
    assert memory.is_mapped(1)
    gpu.release()
    thread.join()
    assert gpu.error() == SUCCESS
    gpu.driver.use_streams([0])
    gpu.hold()
    gpu.read(memory.address, HUGE)
    memory.unmap([0], destroy=True)  # nobody was told
    gpu.release()
    assert gpu.error() != SUCCESS


def case_unmap_waits_for_the_default_stream(gpu: Gpu) -> None:
    memory = reserve(gpu)
    memory.map([0, 1])
    gpu.driver.use_streams([0])
    gpu.hold(0)
    gpu.read(memory.address + HUGE, HUGE, 0)
    thread = begun(gpu, lambda: memory.unmap([1], destroy=True))
    memory.map([2])
    assert memory.is_mapped(1)
    gpu.release(0)
    thread.join()
    assert gpu.error() == SUCCESS


def case_unknown_streams_raise(gpu: Gpu) -> None:
    memory = reserve(gpu)
    memory.map([0, 1])
    assert not gpu.driver.knows_streams
    for call in (lambda: memory.unmap([1]), gpu.driver.drain, lambda: memory.copy([1], [2])):
        with pytest.raises(errors.StreamsUnknownError, match="use_streams"):
            call()
    assert memory.is_mapped(1)
    gpu.driver.use_streams([])
    memory.unmap([1], destroy=True)


def case_empty_stream_list_needs_no_fence(gpu: Gpu) -> None:
    memory = reserve(gpu)
    memory.map([0, 1])
    gpu.driver.use_streams([])
    gpu.hold()
    memory.unmap([1], destroy=True)
    assert gpu.count("cuEventRecord") == 0
    gpu.release()


def case_driver_calls_keep_other_captures_valid(gpu: Gpu) -> None:
    """In this thread and from another, whatever the mode, in streams of both kinds."""
    graph, blocking = gpu.new_stream(), gpu.new_stream(0)
    gpu.driver.use_streams([0, gpu.stream])

    def work() -> None:
        memory = reserve(gpu)
        memory.map([0, 1, 2])
        memory.copy([1], [B])
        memory.unmap([1])
        memory.unmap([2], destroy=True)
        assert gpu.driver.free_bytes < gpu.driver.total_bytes
        fresh = _vmm.CudaDriver("cuda:0")
        fresh.use_streams([])
        fresh.drain()

    for stream in (graph, blocking):
        for mode in (GLOBAL, THREAD_LOCAL):
            gpu.begin_capture(mode, stream)
            work()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            gc.collect()
            assert gpu.end_capture(stream) == SUCCESS
    # The rule is kept by the simulator, and this thread's own mode is what it was.
    gpu.begin_capture(GLOBAL, graph)
    assert gpu.sim.cuCtxSynchronize() != SUCCESS
    assert gpu.end_capture(graph) != SUCCESS


def case_unmap_waits_for_capture_of_its_stream(gpu: Gpu) -> None:
    gpu.driver.use_streams([gpu.stream])
    memory = reserve(gpu)
    memory.map([0, 1])
    gpu.begin_capture()
    before = gpu.count("cuStreamIsCapturing")
    thread = threading.Thread(target=lambda: memory.unmap([1], destroy=True))
    thread.start()
    while gpu.count("cuStreamIsCapturing") < before + 3:
        assert thread.is_alive()
    assert memory.is_mapped(1)
    memory.map([2])
    assert gpu.end_capture() == SUCCESS
    thread.join()
    assert not memory.is_mapped(1)


def case_capture_started_during_a_fence_is_awaited(gpu: Gpu) -> None:
    """The event becomes the graph's; the stream gets another one after the capture."""
    gpu.driver.use_streams([gpu.stream])
    memory = reserve(gpu)
    memory.map([0, 1])
    gpu.begin_capture()
    # Its first look says that the stream is not being captured.
    assert gpu.sim.kvsim_fail(b"cuStreamIsCapturing:1:CUDA_SUCCESS") == 0
    before = gpu.count("cuEventQuery")
    thread = threading.Thread(target=lambda: memory.unmap([1], destroy=True))
    thread.start()
    while gpu.count("cuEventQuery") == before:
        assert thread.is_alive()
    assert memory.is_mapped(1)
    assert gpu.end_capture() == SUCCESS
    thread.join()
    assert not memory.is_mapped(1)
    assert gpu.count("cuEventCreate") == gpu.count("cuEventDestroy") == 2


def case_unmap_waits_for_stream_of_another_context(gpu: Gpu) -> None:
    """As one of a green context; the driver's own is the device's primary context."""
    context = ctypes.c_void_p()
    assert gpu.sim.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == SUCCESS
    stream = gpu.new_stream()
    gpu.driver.use_streams([stream])
    memory = reserve(gpu)
    memory.map([0, 1])
    gpu.hold(stream)
    gpu.read(memory.address + HUGE, 64, stream)
    thread = begun(gpu, lambda: memory.unmap([1], destroy=True))
    assert memory.is_mapped(1)
    gpu.release(stream)
    thread.join()
    assert not memory.is_mapped(1)
    assert gpu.error() == SUCCESS


def case_streams_and_events_are_destroyed(gpu: Gpu) -> None:
    made = gpu.count("cuStreamCreate")
    for _ in range(3):
        driver = _vmm.CudaDriver("cuda")
        driver.use_streams([0, gpu.stream])
        memory = _vmm.Range.reserve(driver, native_geometry(LAYOUTS["paged"], PAGES))
        memory.map([0, 1])
        memory.copy([1], [B])
        memory.unmap([1])
        del driver, memory
        gc.collect()
    assert gpu.count("cuStreamCreate") - made == gpu.count("cuStreamDestroy") == 3 * 4
    assert gpu.count("cuEventCreate") == gpu.count("cuEventDestroy") > 0


def case_failed_wait_leaks_no_event(gpu: Gpu) -> None:
    gpu.driver.use_streams([0, gpu.stream])
    memory = reserve(gpu)
    memory.map([0, 1])
    calls = (
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuStreamIsCapturing",
        "cuStreamGetCtx",
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxPushCurrent",
    )
    for call in calls:
        gpu.sim.kvsim_fail(f"{call}:1:CUDA_ERROR_UNKNOWN".encode())
        with pytest.raises(errors.MappingError, match="CUDA_ERROR_UNKNOWN"):
            memory.unmap([1])
        gpu.sim.kvsim_fail(b"")
        assert memory.is_mapped(1)
    memory.unmap([1], destroy=True)
    assert gpu.count("cuEventCreate") - 1 == gpu.count("cuEventDestroy")


if __name__ == "__main__":
    try:
        globals()[f"case_{sys.argv[1]}"](Gpu())
    except BaseException:
        # Not by the way of destructors: they would wait for a kernel that is still held.
        traceback.print_exc()
        os._exit(1)
    print("passed")
