"""The floor and the baseline of grants: compiled from baseline_calls.cpp, in memory of their own.

with Baseline.make() as baseline:
    baseline.mutex_ns(capacity=1000, count=100_000)
    Baseline.open(baseline.place)            # in another process, while the maker lives
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("baseline_calls.cpp")
WORD = 1 << 64


@dataclass(frozen=True)
class Place:
    """Where another process finds the compiled code and the shared memory."""

    library: str
    memory: str


class Baseline:
    """Grants as they would be with a mutex, and a total of what takers say they hold."""

    def __init__(self, place: Place, folder: Path | None = None, fd: int = -1) -> None:
        self.place = place
        self._folder = folder
        self._fd = fd
        self._code = ctypes.CDLL(place.library)
        self._code.shared_bytes.restype = ctypes.c_uint64
        for name in ("two_adds_ns", "mutex_ns"):
            getattr(self._code, name).restype = ctypes.c_double
        self._add = self._code.add_to_total
        self._add.restype = ctypes.c_uint64
        self._add.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        self._opened = os.open(place.memory, os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self._opened, mmap.PAGESIZE)
        self._at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._map)))

    @staticmethod
    def make() -> Baseline:
        """Compile, and set the shared memory up. Raises `CalledProcessError` without a compiler."""
        folder = Path(tempfile.mkdtemp(prefix="kvelastic-bench-ledger-"))
        library = folder / "baseline.so"
        compiler = os.environ.get("CXX", "c++")
        options = ["-O2", "-std=c++20", "-shared", "-fPIC", "-pthread"]
        try:
            subprocess.run([compiler, *options, "-o", library, SOURCE], check=True)
        except BaseException:
            shutil.rmtree(folder)
            raise
        fd = os.memfd_create("bench-ledger")
        os.ftruncate(fd, mmap.PAGESIZE)
        made = Baseline(Place(str(library), f"/proc/{os.getpid()}/fd/{fd}"), folder, fd)
        assert made._code.shared_bytes() <= mmap.PAGESIZE
        made._code.make(made._at)
        return made

    @staticmethod
    def open(place: Place) -> Baseline:
        """The same memory in another process."""
        return Baseline(place)

    def two_adds_ns(self, count: int) -> float:
        """Mean of an atomic add and a subtraction."""
        return float(self._code.two_adds_ns(self._at, ctypes.c_uint64(count)))

    def mutex_ns(self, capacity: int, count: int) -> float:
        """Mean of a grant and its return, each under the mutex."""
        arguments = (ctypes.c_uint64(capacity), ctypes.c_uint64(count))
        return float(self._code.mutex_ns(self._at, *arguments))

    def add_to_total(self, more: int) -> int:
        """What all hold after this one holds `more` (may be negative); one atomic step."""
        return int(self._add(self._at, more % WORD))

    def close(self) -> None:
        """Remove what `make` made; the mapping stays, for pointers lead into it."""
        os.close(self._opened)
        if self._fd >= 0:
            os.close(self._fd)
        if self._folder is not None:
            shutil.rmtree(self._folder)

    def __enter__(self) -> Baseline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
