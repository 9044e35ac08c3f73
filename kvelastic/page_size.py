"""How large a page is where nobody has said: on a GPU its driver's prices decide.

A driver charges for each handle, nearly whatever its size: an RTX PRO 6000 attaches 10 GiB in 11 ms
when a handle is 64 MiB, and in 364 ms when it is 2 MiB. Large pages make memory cheap to move,
small ones leave less of it unused.

    page_size.of(settings, [device])        # KVELASTIC_PAGE_SIZE_MB, or what the prices say
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvelastic import _vmm
from kvelastic.errors import DriverError
from kvelastic.layout import GRANULARITY_BYTES
from kvelastic.sizes import GIB_BYTES, MIB_BYTES

if TYPE_CHECKING:
    from kvelastic.config import Config
    from kvelastic.device import Device

MOST_US_A_GIB: Final = 3000
"""What the handles of a GiB may cost from creation to end: 10 GiB change hands within 30 ms."""
LARGEST_BYTES: Final = 128 * MIB_BYTES
"""The size that the dearest driver known to us calls for: an A100's."""
FEWEST_PAGES: Final = 64
"""A device has at least so many, however dear they are: a limit is met to 1.6% of it."""
UNKNOWN_US: Final = 135.0
"""Where nothing could be mapped to find out: an H100's price, and not far from others'."""
_TRIES: Final = 8


def of(settings: Config, devices: Sequence[Device]) -> int:
    """The page size in bytes that `PageLayout.solve` is to start from, on all of these devices.

    Where each buffer has pages of its own, a page is a handle for each of them: they stay small.
    """
    follows_prices = settings.page_size_mb is None and settings.contiguous_layout
    if not follows_prices or all(device.is_host for device in devices):
        return settings.page_size_bytes
    return for_price(
        max(device.page_price_us for device in devices),
        min(device.capacity_bytes for device in devices),
    )


def for_price(handle_us: float, capacity_bytes: int) -> int:
    """The smallest power of two at which a GiB costs at most `MOST_US_A_GIB`, within the bounds.

    `handle_us` is what a driver charges for a handle, from its creation to its end.
    """
    size_bytes = GRANULARITY_BYTES
    most_bytes = min(LARGEST_BYTES, capacity_bytes // FEWEST_PAGES)
    while handle_us * GIB_BYTES / size_bytes > MOST_US_A_GIB and 2 * size_bytes <= most_bytes:
        size_bytes *= 2
    return size_bytes


def price_us(settings: Config, driver: _vmm.Driver) -> float:
    """`measured_price_us` of a GPU's driver where that decides; 0 where a size is set."""
    return measured_price_us(driver) if settings.page_size_mb is None else 0.0


def measured_price_us(driver: _vmm.Driver) -> float:
    """What a handle costs with this driver: create, map, set_access, unmap, destroy; microseconds.

    The shortest of a few tries with one granule: whatever else the machine does only adds to it.
    Takes a millisecond or two. `UNKNOWN_US` where the device has no memory to try it with.
    """
    size_bytes = driver.granularity_bytes
    try:
        address = driver.reserve(size_bytes)
    except DriverError:
        return UNKNOWN_US
    try:
        return min(_one_cycle_us(driver, address, size_bytes) for _ in range(_TRIES))
    except DriverError:
        return UNKNOWN_US
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
