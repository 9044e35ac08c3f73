"""What the kernel alone takes to move memory from one memfd to another, as the host driver asks it.

Give back: one hole punched a page. Get: the first 4 KiB of each 2 MiB populated, then one collapse
a page, which zeroes the rest. Beside it: huge pages of anonymous memory populated, which is one
fault each and otherwise zeroing; and a memset from this process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

HUGE_BYTES = 2 << 20
SYSTEM_PAGE_BYTES = 4096
POPULATE_WRITE = 23
COLLAPSE = 25
PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class KernelTimes:
    """Milliseconds for all the bytes."""

    punch_ms: float
    fill_ms: float
    """Of the host driver's sequence."""

    @property
    def moved_ms(self) -> float:
        """One after the other, as one thread does it."""
        return self.punch_ms + self.fill_ms


@dataclass(frozen=True)
class ComparedTimes:
    """What `KernelTimes` are to be seen beside; milliseconds for all the bytes."""

    two_threads_ms: float
    """The fill by two threads, half of the pages each."""
    zero_ms: float
    """Huge pages of anonymous memory: zeroing, and one fault for each."""
    memset_ms: float
    """Of memory that is there."""


def _check(failed: int, call: str) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def _aligned_address(memory: mmap.mmap) -> int:
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return -(-address // HUGE_BYTES) * HUGE_BYTES


def _advise(address: int, bytes_: int, advice: int, name: str) -> None:
    _check(_libc.madvise(address, bytes_, advice), name)


class File:
    """A memfd of some pages, mapped once at an address that huge pages can have."""

    def __init__(self, bytes_: int, page_bytes: int) -> None:
        self.bytes, self.page_bytes = bytes_, page_bytes
        self.fd = os.memfd_create("bench-ledger-floor")
        os.ftruncate(self.fd, bytes_)
        self.memory = mmap.mmap(self.fd, bytes_)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if self.address % HUGE_BYTES:
            raise RuntimeError("the kernel has placed a memfd where huge pages cannot be")

    def fill(self, threads: int = 1) -> float:
        """Milliseconds until all of it is there."""
        share = self.bytes // threads
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._fill, range(0, self.bytes, share), [share] * threads))
        return (time.perf_counter() - start) * 1000

    def _fill(self, offset: int, bytes_: int) -> None:
        begin = self.address + offset
        for at in range(begin, begin + bytes_, self.page_bytes):
            for huge in range(at, at + self.page_bytes, HUGE_BYTES):
                _advise(huge, SYSTEM_PAGE_BYTES, POPULATE_WRITE, "populate")
            _advise(at, self.page_bytes, COLLAPSE, "collapse")

    def punch(self) -> float:
        """Milliseconds until all of it is gone."""
        start = time.perf_counter()
        for offset in range(0, self.bytes, self.page_bytes):
            _check(_libc.fallocate(self.fd, PUNCH_HOLE_KEEP_SIZE, offset, self.page_bytes), "punch")
        return (time.perf_counter() - start) * 1000

    def close(self) -> None:
        """The memory goes with the file and its mapping."""
        self.memory.madvise(mmap.MADV_DONTNEED)
        os.ftruncate(self.fd, 0)
        os.close(self.fd)


def _zero_ms(bytes_: int) -> tuple[float, float]:
    memory = mmap.mmap(-1, bytes_ + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = _aligned_address(memory)
    start = time.perf_counter()
    _advise(address, bytes_, POPULATE_WRITE, "populate")
    zeroed = time.perf_counter()
    ctypes.memset(address, 1, bytes_)
    end = time.perf_counter()
    memory.madvise(mmap.MADV_DONTNEED)
    return (zeroed - start) * 1000, (end - zeroed) * 1000


def measure(bytes_: int, page_bytes: int) -> KernelTimes:
    """One round: the first file full, then what moving its memory to the second one takes."""
    giver, taker = File(bytes_, page_bytes), File(bytes_, page_bytes)
    try:
        giver.fill()
        return KernelTimes(giver.punch(), taker.fill())
    finally:
        giver.close()
        taker.close()


def compare(bytes_: int, page_bytes: int) -> ComparedTimes:
    """One round of what explains `measure`."""
    file = File(bytes_, page_bytes)
    try:
        two_threads_ms = file.fill(threads=2)
    finally:
        file.close()
    return ComparedTimes(two_threads_ms, *_zero_ms(bytes_))
