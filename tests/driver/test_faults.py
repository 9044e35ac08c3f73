"""Every driver call of a batch fails once, and from there on: nothing is lost, nothing leaks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import pytest
from open_memfds import open_memfds

from kvelastic import _vmm, errors

pytestmark = pytest.mark.slow


MIB = 1 << 20
PAGE = 2 * MIB
PAGES = 8
GEOMETRIES = {
    "paged": _vmm.Geometry(
        pages=PAGES, extent_bytes=PAGE, block_bytes=256 << 10, blocks_per_page=8
    ),
    "per buffer": _vmm.Geometry(
        pages=PAGES,
        extent_bytes=PAGE,
        block_bytes=256 << 10,
        blocks_per_page=8,
        extents_per_page=3,
        extent_stride_bytes=PAGES * PAGE,
    ),
}
BATCHES = [[3], [1, 2, 5], [0, 2, 4, 6], [7, 6, 5, 4]]


class Bench:
    """A range over a driver that fails on demand. Leaving the block ends the failures."""

    def __init__(self, geometry: _vmm.Geometry) -> None:
        before = open_memfds()
        self.real = _vmm.HostDriver()
        (self._memfd,) = (fd for inode, fd in open_memfds().items() if inode not in before)
        self.driver = _vmm.FaultDriver(self.real)
        self.memory = _vmm.Range.reserve(self.driver, geometry)
        self.geometry = geometry

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.arm(0)
        if self.memory.failed:  # it keeps its pages until the process ends
            os.truncate(self._memfd, 0)

    def mapped(self) -> list[int]:
        return [page for page in range(PAGES) if self.memory.is_mapped(page)]

    def mark(self, page: int) -> None:
        for at in self.extents(page):
            ctypes.memset(at, page + 1, 16)

    def marked(self, page: int) -> bool:
        return all(ctypes.string_at(at, 16) == bytes([page + 1]) * 16 for at in self.extents(page))

    def extents(self, page: int) -> list[int]:
        stride = self.geometry.extent_stride_bytes
        return [
            self.memory.address + extent * stride + page * PAGE
            for extent in range(self.geometry.extents_per_page)
        ]

    def alive_handles(self) -> int:
        stats = self.real.stats()
        return stats["creates"] - stats["destroys"]


def count_driver_calls(work: Callable[[Bench], object], make: Callable[[], Bench]) -> int:
    """How many calls of the driver `work` makes when none fails."""
    bench = make()
    bench.driver.arm(0)
    work(bench)
    calls = bench.driver.calls
    assert calls > 0
    return calls


@pytest.mark.parametrize("fail_count", [1, 10**6], ids=["once", "for ever"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_map_failing_at_any_call_is_undone(
    geometry: _vmm.Geometry, batch: list[int], fail_count: int
) -> None:
    def make() -> Bench:
        return Bench(geometry)

    for fail_at in range(1, count_driver_calls(lambda b: b.memory.map(batch), make) + 1):
        with make() as bench:
            bench.driver.arm(fail_at, fail_count)
            with pytest.raises(errors.DriverError):
                bench.memory.map(batch)
            assert bench.mapped() == []
            bench.driver.arm(0)
            if bench.memory.failed:
                assert fail_count > 1, "one failure can always be undone"
                with pytest.raises(errors.PoolFailedError):
                    bench.memory.map(batch)
                continue
            bench.memory.check_integrity()
            assert bench.memory.held_bytes == bench.alive_handles() * PAGE
            if fail_count == 1:
                assert bench.memory.held_bytes == 0, "pages created for nothing stay held"
            bench.memory.map(batch)
            assert bench.mapped() == sorted(batch)
            for page in batch:
                bench.mark(page)
                assert bench.marked(page)
            bench.memory.unmap(batch, destroy=True)
            bench.memory.trim()
            assert bench.alive_handles() == 0
            assert bench.memory.held_bytes == 0


@pytest.mark.parametrize("destroy", [True, False], ids=["destroy", "keep"])
@pytest.mark.parametrize("fail_count", [1, 10**6], ids=["once", "for ever"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_unmap_failing_at_any_call_keeps_pages_consistent(
    geometry: _vmm.Geometry, batch: list[int], fail_count: int, destroy: bool
) -> None:
    def make() -> Bench:
        bench = Bench(geometry)
        bench.memory.map(batch)
        for page in batch:
            bench.mark(page)
        return bench

    def unmap(bench: Bench) -> None:
        bench.memory.unmap(batch, destroy=destroy)

    for fail_at in range(1, count_driver_calls(unmap, make) + 1):
        with make() as bench:
            bench.driver.arm(fail_at, fail_count)
            try:
                unmap(bench)
            except errors.DriverError:
                bench.driver.arm(0)
                if bench.memory.failed:
                    assert fail_count > 1, "one failure can always be undone"
                    continue
                assert bench.mapped() == sorted(batch), "all or nothing"
                assert all(bench.marked(page) for page in batch), "the contents are what they were"
                unmap(bench)
            bench.driver.arm(0)
            assert bench.mapped() == []
            bench.memory.check_integrity()
            # A handle that could not be destroyed is kept and counted until the next trim.
            assert bench.memory.held_bytes == bench.alive_handles() * PAGE
            bench.memory.trim()
            assert bench.alive_handles() == 0


@pytest.mark.parametrize("fail_count", [1, 3, 10**6], ids=["once", "three times", "for ever"])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_pool_survives_every_driver_failure(geometry: _vmm.Geometry, fail_count: int) -> None:
    def use(bench: Bench) -> None:
        page_bytes = geometry.page_bytes
        pool = _vmm.Pool(
            bench.memory,
            max_blocks=PAGES * 8,
            limit_bytes=PAGES * page_bytes,
            capacity_bytes=PAGES * page_bytes,
        )
        failed = False
        held: list[int] = []
        for step in (
            lambda: held.extend(pool.alloc(30) or []),
            lambda: pool.cache([held.pop() for _ in range(min(10, len(held)))]),
            lambda: pool.set_limit(2 * page_bytes),
            lambda: pool.free([held.pop() for _ in range(len(held))]),
            lambda: pool.set_limit(PAGES * page_bytes),
            lambda: pool.ensure(40),
            pool.trim,
            lambda: held.extend(pool.alloc(20) or []),
        ):
            try:
                step()
            except errors.DriverError:
                failed = True
            pool.check_integrity()
            if not bench.memory.failed:
                assert pool.mapped_bytes == bench.memory.mapped_pages * page_bytes
                bench.memory.check_integrity()
        pool.take_changes()
        if not failed:
            assert len(set(held)) == len(held)

    for fail_at in range(1, count_driver_calls(use, lambda: Bench(geometry)) + 1):
        with Bench(geometry) as bench:
            bench.driver.arm(fail_at, fail_count)
            use(bench)
