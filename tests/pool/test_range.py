"""Ranges: batches refused as a whole, memory that follows its users, and forked children."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from functools import partial

import needs
import pytest
from native_pools import HUGE, LAYOUTS, Memory, alloc

from kvelastic import errors

PAGES = 6


@pytest.fixture(params=["paged", "per buffer"])
def memory(request):
    return Memory(LAYOUTS[request.param], PAGES)


@pytest.mark.parametrize(
    "batch", [[6], [2, 2], [1, 0], [1 << 32], [-1], [2, 1 << 31], [1 << 64]], ids=str
)
@pytest.mark.parametrize("call", ["map", "unmap"])
def test_invalid_page_rejects_the_whole_batch(memory, call, batch):
    memory.range.map([0, 3] if call == "map" else [1, 2])
    before = [memory.range.is_mapped(page) for page in range(PAGES)]
    with pytest.raises((errors.InvalidArgumentError, OverflowError)):
        getattr(memory.range, call)(batch)
    assert [memory.range.is_mapped(page) for page in range(PAGES)] == before
    assert memory.held_at_the_os() == memory.range.held_bytes == 2 * memory.layout.page_bytes
    memory.range.check_integrity()


def test_empty_batch_does_nothing(memory):
    memory.range.map([])
    memory.range.unmap([])
    assert memory.range.held_bytes == 0


def test_page_outside_the_range_is_not_mapped(memory):
    assert not memory.range.is_mapped(PAGES)
    assert not memory.range.is_mapped((1 << 32) - 1)


def test_handles_are_those_of_mapped_pages(memory):
    memory.range.map([4, 1])
    each = memory.range.geometry.extents_per_page
    found = memory.range.handles([1, 4])
    assert len(set(found)) == len(found) == 2 * each
    assert memory.range.handles([4]) == found[each:]
    assert memory.range.handles([]) == []
    for page in (0, PAGES, 1 << 31):
        with pytest.raises(errors.InvalidArgumentError):
            memory.range.handles([1, page])


def test_unmapped_pages_of_handles_are_reported(memory):
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        memory.range.map([0, 1, 2, 3])
        memory.range.handles([1])
        memory.range.ring_at_unmap(bell)
        memory.range.handles([2])
        memory.range.unmap([3])
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bell)  # the page had been given to nobody
        assert memory.range.take_unmapped() == []
        memory.range.unmap([2, 0, 1])
        assert os.eventfd_read(bell) == 1
        assert memory.range.take_unmapped() == [1, 2]
        assert memory.range.take_unmapped() == []
        assert memory.range.generations([0, 2, 5]) == [1, 1, 0]
        memory.range.map([2])  # another page, with no importer
        memory.range.unmap([2])
        assert memory.range.take_unmapped() == []
        memory.range.check_integrity()
    finally:
        os.close(bell)
    with pytest.raises(errors.DriverError):
        memory.range.ring_at_unmap(bell)


def test_recycled_handles_are_counted_and_used_first(memory):
    memory.range.map([1, 2])
    memory.range.unmap([1, 2])
    creates = memory.host.stats()["creates"]
    assert memory.held_at_the_os() == memory.range.held_bytes == 2 * memory.layout.page_bytes
    memory.range.map([4, 5])
    assert memory.host.stats()["creates"] == creates
    memory.range.unmap([4, 5], destroy=True)
    assert memory.held_at_the_os() == memory.range.held_bytes == 0


@pytest.mark.slow
@needs.torch
def test_memory_lives_as_long_as_its_last_user():
    import torch

    memory = Memory(LAYOUTS["paged"], PAGES)
    memory.range.map([0, 1])
    pool = memory.pool()
    view = torch.from_dlpack(memory.range.tensor())
    assert view.dtype == torch.int8
    assert view.shape == (PAGES * HUGE,)
    assert view.data_ptr() == memory.range.address
    view[HUGE + 5] = 77
    memory.range = None
    assert pool.mapped_bytes == 0
    del pool
    gc.collect()
    assert view[HUGE + 5] == 77, "the tensor keeps the range"
    assert memory.held_at_the_os() == 2 * HUGE
    del view
    gc.collect()
    assert memory.held_at_the_os() == 0


@pytest.mark.slow
def test_range_dropped_by_forked_child_stays_the_parents():
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool = memory.pool()
    ids = pool.alloc(20)
    for block in ids:
        memory.write(block, 33)
    child = os.fork()
    if child == 0:
        try:
            del pool
            memory.range = memory.driver = memory.host = None
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(memory.read(block) == {33} for block in ids)
    assert memory.held_at_the_os() == memory.range.held_bytes
    pool.free(ids)
    pool.trim()
    assert memory.held_at_the_os() == HUGE


def test_threads_map_and_unmap_separate_pages(memory):
    wrong = []

    def work(page):
        try:
            for turn in range(40):
                memory.range.map([page])
                memory.range.unmap([page], destroy=turn % 2 == 0)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(page,)) for page in range(PAGES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    memory.range.check_integrity()
    memory.range.trim()
    assert memory.held_at_the_os() == memory.range.held_bytes == 0


def test_page_list_that_changes_while_read_is_safe(memory):
    """An index that empties the list it stands in must not send native code after freed memory."""
    for page in (1, 2):
        pages: list[object] = []

        class ListClearingIndex:
            def __index__(self, pages=pages, page=page):
                pages.clear()
                return page

        pages += [ListClearingIndex(), *(object() for _ in range(1000))]
        memory.range.map(pages)
        assert [p for p in range(PAGES) if memory.range.is_mapped(p)] == list(range(1, page + 1))


def in_a_child(work: Callable[[], None]) -> str:
    """What `work` says, or raises, in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                work()
                said = "it was done"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


POOL_CALLS = {
    "alloc": lambda pool, ids: pool.alloc(1),
    "free": lambda pool, ids: pool.free(ids),
    "cache": lambda pool, ids: pool.cache(ids),
    "touch": lambda pool, ids: pool.touch(ids),
    "ensure": lambda pool, ids: pool.ensure(20),
    "try_to_reserve": lambda pool, ids: pool.try_to_reserve(1),
    "free_reserved": lambda pool, ids: pool.free_reserved(),
    "take_changes": lambda pool, ids: pool.take_changes(),
    "compact": lambda pool, ids: pool.compact(),
    "begin a session": lambda pool, ids: pool.session().__enter__(),
    "end a session": lambda pool, ids: pool.session().__exit__(),
    "set_limit": lambda pool, ids: pool.set_limit(HUGE),
    "sleep": lambda pool, ids: pool.sleep(),
    "wake": lambda pool, ids: pool.wake(),
    "trim": lambda pool, ids: pool.trim(),
    "clear": lambda pool, ids: pool.clear(),
    # These change nothing, and take a lock that another thread may have held at the fork.
    "is_asleep": lambda pool, ids: pool.is_asleep,
    "limit_state": lambda pool, ids: pool.limit_state(),
    "mapped_bytes": lambda pool, ids: pool.mapped_bytes,
    "occupancy": lambda pool, ids: pool.occupancy(),
    "stats": lambda pool, ids: pool.stats(),
    "pin": lambda pool, ids: pool.pin(ids),
    "unpin": lambda pool, ids: pool.unpin(1),
    "pinned": lambda pool, ids: pool.pinned(),
    "check_integrity": lambda pool, ids: pool.check_integrity(),
}


@pytest.mark.slow
def test_pool_rejects_calls_of_a_forked_child():
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool = memory.pool()
    ids = pool.alloc(20)
    for block in ids:
        memory.write(block, 33)
    before = pool.stats()
    for name, call in POOL_CALLS.items():
        said = in_a_child(partial(call, pool, ids[:1]))
        assert said.startswith("DeviceUnavailableError"), (name, said)
        assert str(os.getpid()) in said, name

    def fork_again() -> None:
        raise RuntimeError(in_a_child(partial(pool.alloc, 1)))

    assert in_a_child(fork_again).startswith("RuntimeError: DeviceUnavailableError")
    assert pool.stats() == before
    assert all(memory.read(block) == {33} for block in ids)
    pool.check_integrity()


def test_range_rejects_calls_of_a_forked_child():
    memory = Memory(LAYOUTS["paged"], PAGES)
    memory.range.map([0, 1])
    memory.range.unmap([1])
    for call in (
        lambda: memory.range.map([1]),  # a recycled handle: its memory is the parent's
        lambda: memory.range.unmap([0]),
        lambda: memory.range.copy([1], [2]),
        memory.range.trim,
        lambda: memory.range.is_mapped(0),
        memory.range.check_integrity,
    ):
        assert in_a_child(call).startswith("DeviceUnavailableError")
    memory.range.map([1])
    memory.range.check_integrity()


def test_forked_child_can_create_its_own_pool():
    memory = Memory(LAYOUTS["paged"], PAGES)
    memory.pool().alloc(1)

    def work() -> None:
        mine = Memory(LAYOUTS["paged"], PAGES)
        ids = alloc(mine.pool(), 3)
        mine.write(ids[0], 5)
        assert mine.read(ids[0]) == {5}

    assert in_a_child(work) == "it was done"
