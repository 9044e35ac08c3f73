"""Other ways to several processes, compiled from channels.cpp: the scheduler's and a worker's end.

with Library.make() as library:
    shared = SharedWords.make(library)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SOURCE = Path(__file__).with_name("channels.cpp")


class Library:
    """The compiled code."""

    def __init__(self, path: str, folder: Path | None = None) -> None:
        self.path = path
        self._folder = folder
        self.code = ctypes.CDLL(path)
        self.code.shared_bytes.restype = ctypes.c_uint64

    @staticmethod
    def make() -> Library:
        """Compile it. Raises `CalledProcessError` without a compiler."""
        folder = Path(tempfile.mkdtemp(prefix="kvelastic-bench-ring-"))
        path = folder / "channels.so"
        compiler = os.environ.get("CXX", "c++")
        options = ["-O2", "-std=c++20", "-shared", "-fPIC"]
        try:
            subprocess.run([compiler, *options, "-o", path, SOURCE], check=True)
        except BaseException:
            shutil.rmtree(folder)
            raise
        return Library(str(path), folder)

    def __enter__(self) -> Library:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)


class SharedWords:
    """Memory that the scheduler and its workers have in common, beside the ring."""

    def __init__(self, library: Library, fd: int) -> None:
        self.fd = fd
        self._code = library.code
        size = int(library.code.shared_bytes())
        self._map = mmap.mmap(fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._map)))

    @staticmethod
    def make(library: Library) -> SharedWords:
        """New memory; its `fd` is for the workers to inherit."""
        fd = os.memfd_create("bench-ring")
        size = int(library.code.shared_bytes())
        os.ftruncate(fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        made = SharedWords(library, fd)
        library.code.make(made._at)
        return made

    def serve_bells(self) -> None:
        """Answers bare futexes; never returns."""
        self._code.serve_bells(self._at)

    def serve_pages(self, rank: int) -> None:
        """Maps and unmaps a page as told; never returns."""
        self._code.serve_pages(self._at, ctypes.c_uint32(rank))

    def bells_us(self, ranks: int, count: int, pause_us: int) -> list[float]:
        """One round each: all are woken, the last one wakes the caller."""
        out = (ctypes.c_double * count)()
        numbers = (ctypes.c_uint32(n) for n in (ranks, count, pause_us))
        self._code.time_bells(self._at, *numbers, out)
        return list(out)

    def page_us(self, ranks: int) -> tuple[float, float]:
        """The next of map and unmap in all: from the first one's begin to the last one's end.

        And the whole round, with the bare futexes before and after.
        """
        span, whole = ctypes.c_double(), ctypes.c_double()
        out = ctypes.byref(span), ctypes.byref(whole)
        self._code.time_page(self._at, ctypes.c_uint32(ranks), *out)
        return span.value, whole.value


def serve_stream(library: Library, in_fd: int, out_fd: int) -> None:
    """Answers messages of 64 bytes until the other end is closed."""
    library.code.serve_stream(in_fd, out_fd)


def streams_us(
    library: Library,
    in_fds: Sequence[int],
    out_fds: Sequence[int],
    *,
    at_once: bool,
    count: int,
    pause_us: int,
) -> list[float]:
    """One round each: a message to every worker and its answer."""
    samples = (ctypes.c_double * count)()
    array = ctypes.c_int * len(in_fds)
    library.code.time_streams(
        array(*in_fds),
        array(*out_fds),
        ctypes.c_uint32(len(in_fds)),
        ctypes.c_bool(at_once),
        ctypes.c_uint32(count),
        ctypes.c_uint32(pause_us),
        samples,
    )
    return list(samples)
