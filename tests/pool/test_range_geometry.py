"""Geometries that would make native code reach beyond a page or a range are refused."""

from __future__ import annotations

import pytest

from kvelastic import _vmm, errors
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import native_geometry

HUGE = 2 << 20
SOUND = {"pages": 8, "extent_bytes": HUGE, "block_bytes": 256 << 10, "blocks_per_page": 8}


@pytest.mark.parametrize(
    "change",
    [
        {"pages": 0},
        {"pages": 1 << 32},
        {"block_bytes": 0},
        {"extent_bytes": 0},
        {"extents_per_page": 0},
        {"blocks_per_page": 0},
        {"blocks_per_page": 9},
        {"blocks_per_page": 1 << 63},
        {"extents_per_page": 2},  # with no stride the extents overlap
        {"extents_per_page": 2, "extent_stride_bytes": 7 * HUGE},
        # Sums and products that pass 2^64 come out small.
        {"pages": (1 << 31) - 1, "extent_bytes": (1 << 33) + HUGE, "blocks_per_page": 1},
        {"pages": 1 << 31, "extent_bytes": 1 << 33, "blocks_per_page": 1},
        {"extents_per_page": 1 << 60, "extent_stride_bytes": 8 * HUGE},
        {"extents_per_page": 3, "extent_stride_bytes": 1 << 63},
    ],
    ids=str,
)
def test_invalid_geometry_numbers_are_rejected(change):
    with pytest.raises(errors.InvalidArgumentError):
        _vmm.Range.reserve(_vmm.HostDriver(), _vmm.Geometry(**(SOUND | change)))


@pytest.mark.parametrize("change", [{"block_bytes": 0}, {"blocks_per_page": 0}, {"pages": 0}])
def test_geometry_constructor_rejects_zero(change):
    """A ring's pool has no range to look at it, and a division by zero ends the process."""
    with pytest.raises(errors.InvalidArgumentError, match=next(iter(change))):
        _vmm.Geometry(**(SOUND | change))


def test_block_must_not_cross_a_page_boundary():
    """3.2 blocks of 640 KiB fit an extent, but page 1 begins inside one, so two are left in it."""
    numbers = {"pages": 8, "extent_bytes": HUGE, "block_bytes": 640 << 10}
    geometry = _vmm.Geometry(**numbers, blocks_per_page=2)
    for page in range(8):
        first = geometry.first_id(page) * numbers["block_bytes"]
        assert page * HUGE <= first
        assert first + 2 * numbers["block_bytes"] <= (page + 1) * HUGE
    with pytest.raises(errors.InvalidArgumentError, match="blocks_per_page"):
        _vmm.Geometry(**numbers, blocks_per_page=3)


def test_solved_layouts_are_valid_geometries():
    for block_bytes in (1 << 10, 24 << 10, 100_000, 3 << 20):
        for buffers in (1, 2, 30):
            for per_buffer in (False, True):
                layout = PageLayout.solve(block_bytes, buffers, per_buffer=per_buffer)
                geometry = native_geometry(layout, 5)
                assert geometry.page_bytes == layout.page_bytes
                assert [geometry.first_id(p) for p in range(5)] == [
                    layout.first_id(p) for p in range(5)
                ]


def test_none_or_wrong_object_is_rejected():
    geometry = _vmm.Geometry(**SOUND)
    memory = _vmm.Range.reserve(_vmm.HostDriver(), geometry)
    numbers = {"max_blocks": 64, "limit_bytes": 1 << 30, "capacity_bytes": 1 << 30}
    for call in (
        lambda: _vmm.Range.reserve(None, geometry),
        lambda: _vmm.Range.reserve(_vmm.HostDriver(), None),
        lambda: _vmm.FaultDriver(None),
        lambda: _vmm.Pool(None, **numbers),
        lambda: _vmm.Pool("memory", **numbers),
        lambda: _vmm.Pool(geometry, **numbers),
        lambda: _vmm.MaintenanceThread.start(None, None),
        lambda: _vmm.RingWorker.start(None, memory),
        lambda: _vmm.Ring.create(None, geometry, 1.0),
    ):
        with pytest.raises(TypeError):
            call()
