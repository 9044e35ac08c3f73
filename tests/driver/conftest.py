"""The drivers that the contract is tried on. A further driver is one more class in DRIVERS."""

from __future__ import annotations

import ctypes

import pytest
from open_memfds import open_memfds

from kvelastic import _vmm


class Host:
    """The machine's own memory."""

    source = "from kvelastic import _vmm; driver = _vmm.HostDriver()"
    """Makes `driver` in another process, whose death by a fault is looked at."""

    unmapped_faults = True

    def __init__(self) -> None:
        before = open_memfds()
        self.driver = _vmm.HostDriver()
        (self._memfd,) = (fd for inode, fd in open_memfds().items() if inode not in before)

    def held_bytes(self) -> int:
        """What the device itself says that this driver's pages cost."""
        return self._memfd.stat().st_blocks * 512

    def read(self, address: int, count: int) -> bytes:
        return ctypes.string_at(address, count)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))


DRIVERS = [Host]


@pytest.fixture(params=DRIVERS, ids=lambda kind: kind.__name__.lower())
def device(request: pytest.FixtureRequest) -> Host:
    """A fresh driver, and a look at its memory from outside."""
    return request.param()
