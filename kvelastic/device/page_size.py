"""The default page size of a GPU, from the costs of its driver.

A driver takes almost the same time for each handle, whatever its size: an RTX PRO 6000 attaches 10
GiB in 11 ms with handles of 64 MiB, and in 364 ms with handles of 2 MiB. Large pages make moving
memory cheap; small pages leave less memory unused. `device_set.page_size_bytes` returns the size
that an instance starts from.

    for_price(measured_price_us(driver), capacity_bytes)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvelastic import _vmm
from kvelastic.errors import DriverError
from kvelastic.units import GIB_BYTES, GRANULARITY_BYTES, MIB_BYTES

if TYPE_CHECKING:
    from kvelastic.config import Config

MOST_US_A_GIB: Final = 500
"""Upper bound of the cost of a GiB's handles in us, from creation to destruction. The handles of 8
GiB then take 4 ms. kvcached's contiguous layout grows 8 GiB in 7.9 ms on an H100."""
SIZES_BYTES: Final = tuple(mib * MIB_BYTES for mib in (2, 8, 32, 128))
"""The sizes are far apart. So an error of a factor of two changes no decision for known GPUs, at 70
us or more (above 16 us, the last size is used)."""
FEWEST_PAGES: Final = 64
"""Minimum number of pages of a device at any cost, so that a limit is met to 1.6% of the device."""
UNKNOWN_US: Final = 135.0
"""The cost in us if no page could be mapped: between an H100's and an A100's."""
_TRIES: Final = 8
_GRANULES: Final = (1, 16)
"""The two measured sizes, in granules."""


def for_price(handle_us: float, capacity_bytes: int) -> int:
    """Return the smallest size with a cost of at most `MOST_US_A_GIB` per GiB, else the largest.

    `handle_us` is the driver's cost of a handle of any size. A small device bounds the result.
    """
    size_bytes = next(
        (size for size in SIZES_BYTES if handle_us * GIB_BYTES / size <= MOST_US_A_GIB),
        SIZES_BYTES[-1],
    )
    return min(size_bytes, most_bytes(capacity_bytes))


def most_bytes(capacity_bytes: int) -> int:
    """Return the largest power of two that fits `FEWEST_PAGES` times; at least a granule."""
    size_bytes = GRANULARITY_BYTES
    while 2 * size_bytes * FEWEST_PAGES <= capacity_bytes:
        size_bytes *= 2
    return size_bytes


def price_us(settings: Config, driver: _vmm.Driver) -> float:
    """Return `measured_price_us`, or 0 without measuring if the page size is configured."""
    return measured_price_us(driver) if settings.page_size_mb is None else 0.0


def measured_price_us(driver: _vmm.Driver) -> float:
    """Measure the cost of a handle in us: create, map, set_access, unmap, destroy.

    Measures two sizes and subtracts the cost per byte, which is the same for pages of any size.
    Uses the shortest of a few tries, because other load only adds time. Takes a few milliseconds.
    If the device has no memory for the larger size, returns the cost of the smaller one; if it has
    none, returns `UNKNOWN_US`.
    """
    small, large = _GRANULES
    small_us = _cycle_us(driver, small * driver.granularity_bytes)
    if small_us is None:
        return UNKNOWN_US
    large_us = _cycle_us(driver, large * driver.granularity_bytes)
    return small_us if large_us is None else fixed_us(small_us, large_us)


def fixed_us(small_us: float, large_us: float) -> float:
    """Return the size-independent part of the cost, from the costs of the two sizes."""
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
    """Call `give_back`, and once more if it fails, so that a temporary failure leaks nothing."""
    try:
        give_back()
    except DriverError:
        give_back()
