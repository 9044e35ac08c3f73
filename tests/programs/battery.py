"""The contract of every driver, as a program: `battery.py DRIVER CASE` (see test_every_driver.py).

A driver is opened once a process, in an environment made for it, so each case is a process. A case
is a function `case_*`; it fails by an assertion. `scripts/gpu` runs them where nothing can be
installed, so they need no pytest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from open_memfds import open_memfds
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm, errors
from kvelastic.device import page_size, selection
from kvelastic.shared import segment

PAGES = 8
EVERY_DRIVER = (
    "granularity",
    "reserved_range_is_free_and_faults",
    "page_life_cycle",
    "adjacent_pages_share_one_call",
    "unaligned_sizes_are_rejected",
    "a_range_and_a_pool",
    "block_copies_to_staging",
    "block_moves",
    "rows_far_apart",
    "threads",
    "unmapped_addresses_are_scratch",
)
EVERY_CUDA = (*EVERY_DRIVER, "page_is_exported_to_another_process")
"""Cases of any GPU; the others look into the simulated driver."""


@contextlib.contextmanager
def refused(error: type[Exception], saying: str = "") -> Iterator[None]:
    """The block must raise this, with a text that has `saying` in it."""
    said = None
    try:
        yield
    except error as raised:
        said = str(raised)
    assert said is not None, f"no {error.__name__}"
    assert saying in said, said


def open_driver(name: str) -> _vmm.Driver:
    if name == "host":
        return _vmm.HostDriver()
    driver = _vmm.CudaDriver("cuda")
    driver.use_streams([0])
    return driver


def simulator() -> ctypes.CDLL | None:
    """The simulated driver's own calls, where it is the one that is loaded."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.kvsim_count.restype = ctypes.c_uint64
        library.kvsim_live_mappings.restype = ctypes.c_uint64
        library.kvsim_live_allocations.restype = ctypes.c_uint64
        library.kvsim_live_ranges.restype = ctypes.c_uint64
    except (OSError, AttributeError):
        return None
    return library


class Contents:
    """Reads and writes of mapped pages: by the CPU on the host, by the driver's copies on a GPU."""

    def __init__(self, driver: _vmm.Driver) -> None:
        self._cuda: ctypes.CDLL | None = None
        if not isinstance(driver, _vmm.CudaDriver):
            return
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), driver.ordinal))
        self._check(self._cuda.cuCtxSetCurrent(context))

    @staticmethod
    def _check(result: int) -> None:
        assert result == 0, f"CUDA error {result}"

    def read(self, address: int, count: int) -> bytes:
        if self._cuda is None:
            return ctypes.string_at(address, count)
        back = ctypes.create_string_buffer(count)
        at, size = ctypes.c_uint64(address), ctypes.c_size_t(count)
        self._check(self._cuda.cuMemcpyDtoH_v2(back, at, size))
        return back.raw

    def write(self, address: int, data: bytes) -> None:
        if self._cuda is None:
            ctypes.memmove(address, data, len(data))
            return
        at, size = ctypes.c_uint64(address), ctypes.c_size_t(len(data))
        self._check(self._cuda.cuMemcpyHtoD_v2(at, data, size))


def faults_in_a_child(driver: _vmm.Driver) -> bool:
    """Whether the CPU can touch addresses at all: a GPU's are the device's own."""
    return not isinstance(driver, _vmm.CudaDriver) or simulator() is not None


def faults(address: int) -> bool:
    """Whether touching the address is a SIGSEGV, tried in a child."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV


def held_bytes(driver: _vmm.Driver) -> int:
    """What this process's pages hold: as the device says where nobody else uses it."""
    if isinstance(driver, _vmm.CudaDriver):
        if simulator() is not None:
            return driver.total_bytes - driver.free_bytes
        # Others come and go on a GPU, and handles are all of one size here.
        made = driver.stats()
        return (made["creates"] - made["destroys"]) * driver.granularity_bytes
    return sum(fd.stat().st_blocks * 512 for fd in open_memfds().values())


def geometry(driver: _vmm.Driver, pages: int = PAGES, extents: int = 1) -> _vmm.Geometry:
    granule = driver.granularity_bytes
    return _vmm.Geometry(
        pages=pages,
        extent_bytes=granule,
        block_bytes=granule // 8,
        blocks_per_page=8,
        extents_per_page=extents,
        extent_stride_bytes=pages * granule if extents > 1 else 0,
    )


def whole_pool(memory: _vmm.Range | _vmm.Ring, *, movable: bool = False) -> _vmm.Pool:
    """A pool that may fill all of it, and maps nothing ahead of demand."""
    whole = memory.geometry
    total_bytes = whole.pages * whole.page_bytes
    return _vmm.Pool(
        memory,
        max_blocks=whole.pages * whole.blocks_per_page,
        limit_bytes=total_bytes,
        capacity_bytes=total_bytes,
        preallocate=False,
        movable=movable,
    )


def case_granularity(driver: _vmm.Driver) -> None:
    granule = driver.granularity_bytes
    assert granule >= 4096
    assert granule & (granule - 1) == 0


def case_reserved_range_is_free_and_faults(driver: _vmm.Driver) -> None:
    before = held_bytes(driver)
    size = 1024 * driver.granularity_bytes
    address = driver.reserve(size)
    assert address % driver.granularity_bytes == 0
    assert held_bytes(driver) == before
    if faults_in_a_child(driver):
        assert faults(address)
        assert faults(address + size - 1)
    driver.release(address, size)


def case_page_life_cycle(driver: _vmm.Driver) -> None:
    granule = driver.granularity_bytes
    before = held_bytes(driver)
    address = driver.reserve(4 * granule)
    handle = driver.create(granule)
    assert held_bytes(driver) - before == granule
    driver.map(address, granule, handle)
    driver.set_access(address, granule)
    contents = Contents(driver)
    if not isinstance(driver, _vmm.CudaDriver):
        assert contents.read(address, granule) == bytes(granule), "a new page holds zeros"
    contents.write(address, bytes([7]) * granule)
    if faults_in_a_child(driver):
        assert faults(address + granule), "the neighbour is not mapped"
    driver.unmap(address, granule)
    if faults_in_a_child(driver):
        assert faults(address)
    driver.map(address + 2 * granule, granule, handle)
    driver.set_access(address + 2 * granule, granule)
    moved = contents.read(address + 2 * granule, granule)
    assert moved == bytes([7]) * granule, "the contents stay with the page"
    driver.unmap(address + 2 * granule, granule)
    driver.destroy(handle, granule)
    assert held_bytes(driver) == before
    driver.release(address, 4 * granule)


def case_adjacent_pages_share_one_call(driver: _vmm.Driver) -> None:
    granule = driver.granularity_bytes
    address = driver.reserve(4 * granule)
    handles = [driver.create(granule) for _ in range(4)]
    for i, handle in enumerate(handles):
        driver.map(address + i * granule, granule, handle)
    driver.set_access(address, 4 * granule)
    data = b"".join(bytes([page]) * granule for page in range(4))
    contents = Contents(driver)
    contents.write(address, data)
    assert contents.read(address, 4 * granule) == data
    driver.unmap(address + granule, 2 * granule)
    driver.unmap(address, granule)
    driver.unmap(address + 3 * granule, granule)
    for handle in handles:
        driver.destroy(handle, granule)
    driver.release(address, 4 * granule)


def case_unaligned_sizes_are_rejected(driver: _vmm.Driver) -> None:
    before = driver.stats()
    for size in (0, 1, driver.granularity_bytes + 1, driver.granularity_bytes // 2):
        for call in (driver.reserve, driver.create):
            with refused(errors.InvalidArgumentError, str(size)):
                call(size)
    assert driver.stats() == before


def case_a_range_and_a_pool(driver: _vmm.Driver) -> None:
    for extents in (1, 3):
        before = held_bytes(driver)
        memory = _vmm.Range.reserve(driver, geometry(driver, extents=extents))
        page_bytes = memory.geometry.page_bytes
        total = PAGES * page_bytes
        pool = whole_pool(memory)
        ids = pool.alloc(PAGES * 8 - 1)
        assert ids is not None
        assert held_bytes(driver) - before == total == pool.mapped_bytes
        pool.cache(ids[:32])
        assert pool.set_limit(4 * page_bytes)["state"] == "shrinking"
        pool.free(ids[32:])
        assert pool.limit_state()["state"] == "applied"
        assert held_bytes(driver) - before == pool.mapped_bytes <= 4 * page_bytes
        pool.take_changes()
        pool.clear()
        pool.trim()
        assert held_bytes(driver) - before == page_bytes
        pool.check_integrity()
        memory.check_integrity()
        del pool, memory
        assert held_bytes(driver) == before


def case_block_copies_to_staging(driver: _vmm.Driver) -> None:
    for extents in (1, 3):
        memory = _vmm.Range.reserve(driver, geometry(driver, extents=extents))
        pool = whole_pool(memory)
        ids = pool.alloc(5)
        assert ids is not None
        staging = _vmm.Staging(6, pool.record_bytes)
        for slot in range(6):
            staging.view(slot)[:] = bytes([17 * slot + 1]) * pool.record_bytes
        pool.copy_in(staging, [0, 1, 2, 3, 4], ids)
        pool.copy_out([ids[2]], staging, [5])
        assert bytes(staging.view(5)) == bytes(staging.view(2))
        library = simulator()
        if library is not None:
            library.kvsim_reset_counts()
        pool.copy_out(ids, staging, [4, 3, 2, 1, 0])
        for slot in range(5):
            assert set(staging.view(slot)) == {17 * (4 - slot) + 1}
        if library is not None:
            library.kvsim_count.restype = ctypes.c_uint64
            rows = library.kvsim_count(b"cuMemcpy2DAsync")
            assert rows == 5 * extents, "one strided copy for each extent of a block"
        pool.close(discard=True)


def case_copies_are_queued_beside_each_other(driver: _vmm.Driver) -> None:
    """One in the other direction, or the next piece of the same, does not wait for the first."""
    assert isinstance(driver, _vmm.CudaDriver)
    driver.use_streams([])
    sim = simulator()
    assert sim is not None
    memory = _vmm.Range.reserve(driver, geometry(driver))
    pool = whole_pool(memory)
    ids = pool.alloc(6)
    assert ids is not None
    staging = _vmm.Staging(6, pool.record_bytes)
    for slot in range(6):
        staging.view(slot)[:] = bytes([slot + 1]) * pool.record_bytes
    pool.copy_in(staging, [0, 1, 2, 3], ids[:4])
    for slot in range(4):
        staging.view(slot)[:] = bytes(pool.record_bytes)
    sim.kvsim_reset_counts()
    held = Path(os.environ["KVSIM_HOLD"])  # while it exists, no stream runs what is queued
    held.touch()
    copies: list[Callable[[], None]] = [
        lambda: pool.copy_out(ids[:2], staging, [0, 1]),
        lambda: pool.copy_in(staging, [4, 5], ids[4:]),
        lambda: pool.copy_out(ids[2:4], staging, [2, 3]),
    ]
    threads = [threading.Thread(target=copy) for copy in copies]
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: sim.kvsim_count(b"cuMemcpy2DAsync") == 6, "six copies are queued")
        assert all(thread.is_alive() for thread in threads)
    finally:
        held.unlink()
    for thread in threads:
        thread.join(DEADLINE_S)
    pool.copy_out(ids[4:], staging, [0, 1])
    assert [staging.view(slot)[0] for slot in range(6)] == [5, 6, 3, 4, 5, 6]
    pool.close(discard=True)


def case_rows_far_apart(driver: _vmm.Driver) -> None:
    """Blocks of an engine whose rows lie further apart than a GPU's strided copy takes."""
    granule = driver.granularity_bytes
    apart, row = 3 << 30, 4096
    base = driver.reserve(2 * apart)
    handles = []
    for offset in (0, apart):
        handles.append(driver.create(granule))
        driver.map(base + offset, granule, handles[-1])
        driver.set_access(base + offset, granule)
    blocks = _vmm.EngineBlocks(driver, [(base, row, row, 2, apart)], 16)
    staging = _vmm.Staging(2, blocks.record_bytes)
    data = bytes(range(256)) * (2 * row // 256)
    staging.view(0)[:] = data[::-1]
    blocks.copy_in(staging, [0], [3])
    contents = Contents(driver)
    assert contents.read(base + 3 * row, row) == data[::-1][:row]
    contents.write(base + apart + 3 * row, data[row:])
    blocks.copy_out([3], staging, [1])
    assert bytes(staging.view(1)) == data[::-1][:row] + data[row:]
    del blocks
    for offset, handle in zip((0, apart), handles, strict=True):
        driver.unmap(base + offset, granule)
        driver.destroy(handle, granule)
    driver.release(base, 2 * apart)


def case_block_moves(driver: _vmm.Driver) -> None:
    for extents in (1, 3):
        memory = _vmm.Range.reserve(driver, geometry(driver, extents=extents))
        pool = whole_pool(memory)
        ids = pool.alloc(9)
        assert ids is not None
        staging = _vmm.Staging(4, pool.record_bytes)
        for slot in range(2):
            # Every buffer of a block has bytes of its own.
            pattern = bytes((slot + 7 * (byte // 512)) % 251 for byte in range(pool.record_bytes))
            staging.view(slot)[:] = pattern
        pool.copy_in(staging, [0, 1], ids[:2])
        library = simulator()
        if library is not None:
            library.kvsim_reset_counts()
        memory.copy(ids[:2], ids[7:9])
        if library is not None:
            library.kvsim_count.restype = ctypes.c_uint64
            assert library.kvsim_count(b"cuMemcpy2DAsync") == 2 * extents
        pool.copy_out(ids[7:9], staging, [2, 3])
        assert bytes(staging.view(2)) == bytes(staging.view(0))
        assert bytes(staging.view(3)) == bytes(staging.view(1))
        pool.close(discard=True)


def case_threads(driver: _vmm.Driver) -> None:
    memory = _vmm.Range.reserve(driver, geometry(driver))
    failures: list[BaseException] = []

    def work(page: int) -> None:
        try:
            for i in range(20):
                memory.map([page])
                memory.unmap([page], destroy=i % 2 == 0)
        except BaseException as error:  # told to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(page,)) for page in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    memory.trim()
    assert memory.held_bytes == 0


def case_recycled_page_costs_three_calls(driver: _vmm.Driver) -> None:
    calls = simulator()
    assert calls is not None, "only the simulator counts calls"
    memory = _vmm.Range.reserve(driver, geometry(driver))
    memory.map([3])
    memory.unmap([3])

    def vmm_calls() -> dict[str, int]:
        names = ("Create", "Release", "Map", "SetAccess", "Unmap", "AddressReserve", "AddressFree")
        return {name: calls.kvsim_count(f"cuMem{name}".encode()) for name in names}

    before = vmm_calls()
    memory.map([3])
    memory.unmap([3])
    made = {name: count - before[name] for name, count in vmm_calls().items()}
    assert made == {
        "Map": 1, "SetAccess": 1, "Unmap": 1,
        "Create": 0, "Release": 0, "AddressReserve": 0, "AddressFree": 0,
    }  # fmt: skip
    pool = whole_pool(memory)
    pool.free(pool.alloc(40) or [])
    calls.kvsim_reset_counts()
    ids = pool.alloc(40)
    pool.free(ids or [])
    assert calls.kvsim_count(b"*") == 0, "parked pages cost no call of any kind"


def case_batches_of_handles_grow(driver: _vmm.Driver) -> None:
    """Batches of 4, 8, then 16 handles at most: a call each to give access, and to unmap."""
    sim = simulator()
    assert sim is not None
    pages = 113
    memory = _vmm.Range.reserve(driver, geometry(driver, pages))
    pool = whole_pool(memory)
    pool.ensure(1)
    sim.kvsim_reset_counts()
    ids = pool.alloc(112 * 8) or []
    assert sim.kvsim_count(b"cuMemMap") == 112
    assert sim.kvsim_count(b"cuMemSetAccess") == 9
    pool.free(ids)
    pool.trim()
    assert sim.kvsim_count(b"cuMemUnmap") == 9
    assert pool.mapped_bytes == driver.granularity_bytes


def case_failures_leave_nothing_behind(driver: _vmm.Driver) -> None:
    """Every call from the first to the last fails, in growing, shrinking and ending."""
    failures_leave_nothing_behind(lambda: driver, geometry(driver, extents=2))


def case_every_failure_of_a_worker_start_is_clean(driver: _vmm.Driver) -> None:
    """As an engine's: the device is opened, a page priced, and a scheduler maps over the ring."""
    whole = geometry(driver)

    def work() -> None:
        own = _vmm.CudaDriver("cuda")
        own.use_streams([0])
        page_size.measured_price_us(own)
        memory = selection.reserve_range(own, whole, guard_pages=False)
        with segment.create(f"kvtest_start_{os.getpid()}", engine="test", device="cuda") as seg:
            ring = _vmm.Ring.create(seg.control_block, whole, 30.0)
            worker = _vmm.RingWorker.start(seg.control_block, memory)
            try:
                ring.wait_for_workers(30.0)
                pool = whole_pool(ring)
                pool.ensure(1)
                pool.free(pool.alloc(20) or [])
                pool.sleep()
                pool.check_integrity()
            finally:
                worker.stop()

    every_call_fails_once(work)


def failures_leave_nothing_behind(
    open_one: Callable[[], _vmm.Driver], whole: _vmm.Geometry
) -> None:

    def work() -> None:
        memory = _vmm.Range.reserve(open_one(), whole)
        total = PAGES * whole.page_bytes
        pool = whole_pool(memory)
        ids = pool.alloc(30) or []
        pool.cache(ids[10:])
        pool.set_limit(2 * whole.page_bytes)
        pool.free(ids[:10])
        pool.set_limit(total)
        pool.ensure(20)
        pool.trim()
        pool.check_integrity()

    every_call_fails_once(work)


def every_call_fails_once(work: Callable[[], None]) -> None:
    sim = simulator()
    assert sim is not None
    sim.kvsim_fail(b"")
    sim.kvsim_reset_counts()
    work()
    calls = sim.kvsim_count(b"*")
    assert calls > 50
    for failing in range(1, calls + 1):
        sim.kvsim_fail(f"*:{failing}:CUDA_ERROR_UNKNOWN".encode())
        with contextlib.suppress(errors.KvelasticError):
            work()
        sim.kvsim_fail(b"")
        while sim.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())) == 0:
            pass  # where popping failed the context is still on the thread's stack, which is finite
        left = (sim.kvsim_live_mappings(), sim.kvsim_live_allocations(), sim.kvsim_live_ranges())
        assert left == (0, 0, 0), f"call {failing} of {calls} left {left} behind"


def case_not_ready_is_retried(driver: _vmm.Driver) -> None:
    sim = simulator()
    assert sim is not None
    sim.kvsim_fail(b"cuMemSetAccess:1-3:CUDA_ERROR_NOT_READY,cuMemUnmap:1-2:CUDA_ERROR_NOT_READY")
    memory = _vmm.Range.reserve(driver, geometry(driver))
    memory.map([0, 1])
    memory.unmap([0, 1], destroy=True)
    assert sim.kvsim_count(b"cuMemSetAccess") >= 4


def case_out_of_memory_returns_none(driver: _vmm.Driver) -> None:
    """KVSIM_MEMORY has room for five pages: the sixth is refused, and nothing is lost."""
    memory = _vmm.Range.reserve(driver, geometry(driver))
    pool = whole_pool(memory)
    assert pool.alloc(6 * 8) is None
    assert pool.mapped_bytes == 4 * memory.geometry.page_bytes, "the first batch stays, parked"
    ids = pool.alloc(4 * 8)
    assert ids is not None
    assert pool.alloc(3 * 8) is None
    pool.free(ids)
    pool.check_integrity()


def case_full_device_copies_and_unmaps(driver: _vmm.Driver) -> None:
    """KVSIM_CONTEXT_GROWTH: a stream takes memory, of which there is none when it is needed."""
    granule = driver.granularity_bytes
    memory = _vmm.Range.reserve(driver, geometry(driver))
    pool = whole_pool(memory)
    ids = pool.alloc(3 * 8 - 1)
    assert ids is not None
    rest = []
    with contextlib.suppress(errors.OutOfMemoryError):
        while True:
            rest.append(driver.create(granule))
    assert rest
    staging = _vmm.Staging(2, pool.record_bytes)
    staging.view(0)[:] = b"\7" * pool.record_bytes
    pool.copy_in(staging, [0], ids[-1:])
    pool.copy_out(ids[-1:], staging, [1])
    assert bytes(staging.view(1)) == bytes(staging.view(0))
    pool.free(ids)
    assert pool.trim() == 2 * granule
    for handle in rest:
        driver.destroy(handle, granule)


def case_mapping_cap_raises_out_of_memory(driver: _vmm.Driver) -> None:
    """KVSIM_MAX_MAPPINGS is five: the sixth is refused when it gets access."""
    memory = _vmm.Range.reserve(driver, geometry(driver))
    memory.map([0, 2])
    with refused(errors.OutOfMemoryError):
        memory.map([3, 4, 5, 6])
    assert memory.mapped_pages == 2
    memory.map([3, 4, 5])
    with refused(errors.OutOfMemoryError):
        memory.map([7])
    memory.unmap([2, 3])
    memory.map([6, 7])
    memory.check_integrity()


def case_pages_are_unmapped_after_use(driver: _vmm.Driver) -> None:
    """A kernel that reads a page is still to run: the unmap waits for it, and for nothing later."""
    sim = simulator()
    assert sim is not None
    memory = _vmm.Range.reserve(driver, geometry(driver))
    memory.map([0, 1])
    assert sim.kvsim_hold_stream(None) == 0
    page = memory.address + driver.granularity_bytes
    assert sim.kvsim_enqueue_read(None, ctypes.c_uint64(page), ctypes.c_size_t(64)) == 0
    done = threading.Event()

    def unmap() -> None:
        memory.unmap([1], destroy=True)
        done.set()

    thread = threading.Thread(target=unmap)
    thread.start()
    memory.map([2])  # another page need not wait
    assert memory.is_mapped(2)
    assert memory.is_mapped(1)
    assert not done.is_set()
    assert sim.kvsim_release_stream(None) == 0
    thread.join(DEADLINE_S)
    assert done.is_set()
    memory.map([1])  # the device still answers: nothing was read too late


def guarded(driver: _vmm.Driver) -> _vmm.Driver:
    return _vmm.GuardDriver(driver, driver.granularity_bytes)


def case_unmapped_addresses_are_scratch(driver: _vmm.Driver) -> None:
    granule = driver.granularity_bytes
    before = held_bytes(driver)
    memory = _vmm.Range.reserve(guarded(driver), geometry(driver))
    assert held_bytes(driver) - before == granule, "one scratch page for all addresses"
    contents = Contents(driver)
    address = memory.address

    def page(index: int) -> int:
        return address + index * granule

    contents.write(page(7), b"astray")
    assert contents.read(page(0), 6) == b"astray", "all that is unmapped is the same page"
    memory.map([0, 1])
    contents.write(page(0), b"page 0")
    contents.write(page(1), b"page 1")
    contents.write(page(2), b"beyond")
    assert contents.read(page(0), 6) + contents.read(page(1), 6) == b"page 0page 1"
    memory.unmap([0])
    assert contents.read(page(0), 6) == b"beyond"
    memory.map([3])
    assert contents.read(page(3), 6) == b"page 0", "a page keeps its contents"
    memory.unmap([1, 3], destroy=True)
    del memory
    assert held_bytes(driver) == before


def case_guarded_kernel_overread_hits_scratch(driver: _vmm.Driver) -> None:
    sim = simulator()
    assert sim is not None
    memory = _vmm.Range.reserve(guarded(driver), geometry(driver))
    memory.map([0])
    for page in range(PAGES):
        at = ctypes.c_uint64(memory.address + page * driver.granularity_bytes)
        assert sim.kvsim_enqueue_read(None, at, ctypes.c_size_t(64)) == 0
    Contents(driver)  # with a context, and so
    assert sim.cuCtxSynchronize() == 0
    memory.map([1])  # the device still answers
    bare = _vmm.Range.reserve(driver, geometry(driver))
    sim.kvsim_enqueue_read(None, ctypes.c_uint64(bare.address), ctypes.c_size_t(64))
    assert sim.cuCtxSynchronize() == 0
    with refused(errors.DriverError):
        bare.map([0])


def case_guarded_cycle_costs_six_calls(driver: _vmm.Driver) -> None:
    sim = simulator()
    assert sim is not None
    names = (b"cuMemMap", b"cuMemSetAccess", b"cuMemUnmap")
    memory = _vmm.Range.reserve(guarded(driver), geometry(driver))
    assert [sim.kvsim_count(name) for name in names] == [PAGES, 1, 0]
    memory.map([3])
    memory.unmap([3])
    sim.kvsim_reset_counts()
    memory.map([3])
    memory.unmap([3])
    assert [sim.kvsim_count(name) for name in names] == [2, 2, 2]


def case_guard_failures_leave_nothing_behind(driver: _vmm.Driver) -> None:
    failures_leave_nothing_behind(lambda: guarded(driver), geometry(driver, extents=2))


def case_page_is_exported_to_another_process(driver: _vmm.Driver) -> None:
    assert isinstance(driver, _vmm.CudaDriver)
    granule = driver.granularity_bytes
    address = driver.reserve(granule)
    handle = driver.create(granule)
    fd = driver.export_page(handle)
    again = driver.import_page(fd)
    os.close(fd)
    driver.map(address, granule, again)
    driver.set_access(address, granule)
    driver.destroy(handle, granule)
    contents = Contents(driver)
    contents.write(address, bytes([3]) * granule)
    assert contents.read(address, granule) == bytes([3]) * granule
    driver.unmap(address, granule)
    driver.destroy(again, granule)
    driver.release(address, granule)


if __name__ == "__main__":
    opened = open_driver(sys.argv[1])
    globals()[f"case_{sys.argv[2]}"](opened)
    print("passed")
