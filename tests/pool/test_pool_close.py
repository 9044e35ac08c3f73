"""Memory first, then its grant: a pool that closes leaves no page that no ledger knows of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from open_memfds import open_memfds
from own_pool import BLOCKS_PER_PAGE as B
from own_pool import LAYOUT, PAGES, make_pool, own_settings, start_pool

from kvelastic import _vmm, errors
from kvelastic.pool.pool import ElasticPool
from kvelastic.pool.tensors import whole_range
from kvelastic.shared import ledger, segment

MIB = 1 << 20


class Device:
    """A ledger of the test's own, and the pools on it."""

    def __init__(self) -> None:
        self.settings = own_settings()

    @property
    def group(self) -> str:
        return self.settings.ledger

    def pool(self) -> ElasticPool:
        return start_pool(self.settings)

    def granted_bytes(self) -> int:
        infos = [info for info in ledger.list_ledgers() if info.group == self.group]
        return sum(member.granted_bytes for info in infos for member in info.members)


def resident_bytes(before: set[int]) -> int:
    """Of the memory files of this process that were not there before."""
    return sum(
        fd.stat().st_blocks * 512 for inode, fd in open_memfds().items() if inode not in before
    )


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    ledger.reap()
    assert not [info for info in ledger.list_ledgers() if info.group == made.group]


def test_discarding_close_releases_all_memory(device: Device) -> None:
    before = set(open_memfds())
    pool = device.pool()
    assert pool.blocks.alloc(3 * B)
    assert resident_bytes(before) >= 3 * LAYOUT.page_bytes
    pool.close(discard=True)
    assert resident_bytes(before) == device.granted_bytes() == pool.blocks.mapped_bytes == 0
    pool.close()
    with pytest.raises(errors.PoolFailedError, match="closed"):
        pool.blocks.alloc(1)
    with pytest.raises(errors.PoolFailedError, match="closed"):
        pool.blocks.ensure(1)
    pool.blocks.wake()
    assert pool.blocks.available_size() == 0


def test_close_keeps_memory_and_grant_of_used_blocks(device: Device) -> None:
    """Tensors over it stay valid, so no other instance may be granted what is behind them."""
    import torch

    before = set(open_memfds())
    pool = device.pool()
    ids = pool.blocks.alloc(2 * B)
    cached = pool.blocks.alloc(3 * B)
    assert ids
    assert cached
    pool.blocks.cache(cached)
    flat: torch.Tensor | None = whole_range(pool.memory)  # type: ignore[arg-type]
    assert flat is not None
    at = LAYOUT.offset_bytes(ids[0], 0, PAGES)
    flat[at] = 77
    pool.close()
    held = pool.blocks.mapped_bytes
    assert 2 * LAYOUT.page_bytes <= held <= 3 * LAYOUT.page_bytes, "cached and parked went"
    assert resident_bytes(before) == device.granted_bytes() == held
    other = device.pool()
    assert other.blocks.alloc((PAGES - 1) * B) is None, "granted twice"
    other.close()
    assert int(flat[at]) == 77
    # What is freed after the close goes at once, and so does its grant.
    pool.blocks.free(ids[B:])
    assert resident_bytes(before) == device.granted_bytes() == pool.blocks.mapped_bytes
    del pool
    assert device.granted_bytes() > 0
    assert int(flat[at]) == 77
    del flat
    assert resident_bytes(before) == device.granted_bytes() == 0


def test_pool_that_cannot_start_is_closed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    pool = make_pool(device.settings)
    assert pool.blocks.ensure(1)
    monkeypatch.setattr(_vmm, "MaintenanceThread", SimpleNamespace(start=refuse))
    with pytest.raises(RuntimeError, match="can't start"):
        pool.start_maintenance()
    assert device.granted_bytes() == pool.blocks.mapped_bytes == 0
    assert pool.name not in [info.name for info in segment.list_segments()]


def test_close_in_a_forked_child_releases_nothing(device: Device) -> None:
    pool = device.pool()
    assert pool.blocks.alloc(B)
    held = device.granted_bytes()
    child = os.fork()
    if child == 0:
        try:
            pool.close(discard=True)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert device.granted_bytes() == held == pool.blocks.mapped_bytes
    pool.blocks.check_integrity()
    pool.close(discard=True)
