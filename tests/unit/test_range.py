"""Ranges: batches refused as a whole, memory that follows its users, and forked children."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import pytest

from kvelastic import errors

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))
from native_pools import HUGE, LAYOUTS, Memory

PAGES = 6


@pytest.fixture(params=["paged", "per buffer"])
def memory(request):
    return Memory(LAYOUTS[request.param], PAGES)


@pytest.mark.parametrize(
    "batch", [[6], [2, 2], [1, 0], [1 << 32], [-1], [2, 1 << 31], [1 << 64]], ids=str
)
@pytest.mark.parametrize("call", ["map", "unmap"])
def test_a_wrong_page_spoils_the_whole_batch(memory, call, batch):
    memory.range.map([0, 3] if call == "map" else [1, 2])
    before = [memory.range.is_mapped(page) for page in range(PAGES)]
    with pytest.raises((errors.InvalidArgumentError, OverflowError)):
        getattr(memory.range, call)(batch)
    assert [memory.range.is_mapped(page) for page in range(PAGES)] == before
    assert memory.held_at_the_os() == memory.range.held_bytes == 2 * memory.layout.page_bytes
    memory.range.check_integrity()


def test_an_empty_batch_does_nothing(memory):
    memory.range.map([])
    memory.range.unmap([])
    assert memory.range.held_bytes == 0


def test_a_page_outside_is_not_mapped(memory):
    assert not memory.range.is_mapped(PAGES)
    assert not memory.range.is_mapped((1 << 32) - 1)


def test_kept_pages_are_counted_and_used_first(memory):
    memory.range.map([1, 2])
    memory.range.unmap([1, 2])
    creates = memory.host.stats()["creates"]
    assert memory.held_at_the_os() == memory.range.held_bytes == 2 * memory.layout.page_bytes
    memory.range.map([4, 5])
    assert memory.host.stats()["creates"] == creates
    memory.range.unmap([4, 5], destroy=True)
    assert memory.held_at_the_os() == memory.range.held_bytes == 0


def test_the_memory_goes_with_its_last_user():
    torch = pytest.importorskip("torch")
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


def test_a_forked_child_that_drops_a_range_takes_nothing_from_its_parent():
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


def test_threads_map_and_unmap_pages_of_their_own(memory):
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


def test_a_list_that_changes_while_it_is_read(memory):
    """An index that empties the list it stands in must not send native code after freed memory."""
    for page in (1, 2):
        pages: list[object] = []

        class Evil:
            def __index__(self, pages=pages, page=page):
                pages.clear()
                return page

        pages += [Evil(), *(object() for _ in range(1000))]
        memory.range.map(pages)
        assert [p for p in range(PAGES) if memory.range.is_mapped(p)] == list(range(1, page + 1))
