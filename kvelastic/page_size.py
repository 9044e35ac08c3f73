"""The default page size of a GPU, from the prices of its driver.

A driver charges for each handle, nearly whatever its size: an RTX PRO 6000 attaches 10 GiB in 11 ms
when a handle is 64 MiB, and in 364 ms when it is 2 MiB. Large pages make memory cheap to move,
small ones leave less of it unused. `places.page_size_bytes` is what an instance starts from.

    for_price(measured_price_us(driver), capacity_bytes)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvelastic import _vmm
from kvelastic.errors import DriverError
from kvelastic.sizes import GIB_BYTES, GRANULARITY_BYTES, MIB_BYTES

if TYPE_CHECKING:
    from kvelastic.config import Config

MOST_US_A_GIB: Final = 500
"""The largest price of the handles of a GiB, from creation to end. The handles of 8 GiB then cost
4 ms. kvcached's contiguous layout grows 8 GiB in 7.9 ms on an H100."""
SIZES_BYTES: Final = tuple(mib * MIB_BYTES for mib in (2, 8, 32, 128))
"""Far apart: an error of a factor of two changes no decision at the price of a known GPU, 70 us or
more (above 16 us it is the last one)."""
FEWEST_PAGES: Final = 64
"""The fewest pages of a device, whatever they cost: a limit is met to 1.6% of it."""
UNKNOWN_US: Final = 135.0
"""The price if nothing could be mapped: between an H100's and an A100's."""
_TRIES: Final = 8
_GRANULES: Final = (1, 16)
"""The two sizes that are measured."""


def for_price(handle_us: float, capacity_bytes: int) -> int:
    """The smallest size at which a GiB costs at most `MOST_US_A_GIB`, else the largest.

    `handle_us` is what the driver charges for a handle of any size. A small device bounds it.
    """
    size_bytes = next(
        (size for size in SIZES_BYTES if handle_us * GIB_BYTES / size <= MOST_US_A_GIB),
        SIZES_BYTES[-1],
    )
    return min(size_bytes, most_bytes(capacity_bytes))


def most_bytes(capacity_bytes: int) -> int:
    """The largest power of two of which a device has `FEWEST_PAGES`; at least a granule."""
    size_bytes = GRANULARITY_BYTES
    while 2 * size_bytes * FEWEST_PAGES <= capacity_bytes:
        size_bytes *= 2
    return size_bytes


def price_us(settings: Config, driver: _vmm.Driver) -> float:
    """`measured_price_us` of a GPU's driver where that decides; 0 where a size is set."""
    return measured_price_us(driver) if settings.page_size_mb is None else 0.0


def measured_price_us(driver: _vmm.Driver) -> float:
    """What a handle of any size costs: create, map, set_access, unmap, destroy; microseconds.

    Two sizes are tried, and what the driver charges for each byte is subtracted: it is the same for
    a GiB in pages of any size. The shortest of a few tries counts, since other work of the machine
    only adds to a try. Takes a few milliseconds. If the device has no memory for the larger size,
    the price of the smaller one; if it has none, `UNKNOWN_US`.
    """
    small, large = _GRANULES
    small_us = _cycle_us(driver, small * driver.granularity_bytes)
    if small_us is None:
        return UNKNOWN_US
    large_us = _cycle_us(driver, large * driver.granularity_bytes)
    return small_us if large_us is None else fixed_us(small_us, large_us)


def fixed_us(small_us: float, large_us: float) -> float:
    """The part of a price that does not grow with the size, from the prices of the two sizes."""
    small, large = _GRANULES
    per_granule_us = max(large_us - small_us, 0.0) / (large - small)
    return max(small_us - small * per_granule_us, 0.0)


def _cycle_us(driver: _vmm.Driver, size_bytes: int) -> float | None:
    try:
        address = driver.reserve(size_bytes)
    except DriverError:
        return None
    try:
        return min(_one_cycle_us(driver, address, size_bytes) for _ in range(_TRIES))
    except DriverError:
        return None
    finally:
        _twice(lambda: driver.release(address, size_bytes))


def _one_cycle_us(driver: _vmm.Driver, address: int, size_bytes: int) -> float:
    begin_ns = time.perf_counter_ns()
    handle = driver.create(size_bytes)
    try:
        driver.map(address, size_bytes, handle)
        try:
            driver.set_access(address, size_bytes)
        finally:
            _twice(lambda: driver.unmap(address, size_bytes))
    finally:
        _twice(lambda: driver.destroy(handle, size_bytes))
    return (time.perf_counter_ns() - begin_ns) / 1000


def _twice(give_back: Callable[[], None]) -> None:
    """A failure that passes leaves nothing behind."""
    try:
        give_back()
    except DriverError:
        give_back()
