"""The driver API over ctypes, and processes of their own to use it in.

The driver reads its environment once a process, so every use runs in a child:

    def body(channel: socket.socket) -> object:
        gpu = Driver().start()
        address = gpu.reserve(2 * MIB)
        ...
        return gpu.free_bytes()

    assert run(body, KVSIM_MEMORY="64M") == 62 * MIB
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import json
import os
import signal
import socket
import subprocess
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import DEADLINE_S

HERE = Path(__file__).parent
KIB = 1 << 10
MIB = 1 << 20
PAGE = 2 * MIB

POSIX_FD = 1
READ = 1
READWRITE = 3


@functools.cache
def library() -> Path:
    """The built library; built first where it is missing or older than its sources."""
    built = subprocess.run([HERE / "build"], check=True, capture_output=True, text=True)
    return Path(built.stdout.strip()) / "libcuda.so.1"


class CudaError(Exception):
    """A driver call answered something else than CUDA_SUCCESS; `name` is what."""

    def __init__(self, function: str, name: str) -> None:
        super().__init__(f"{function}: {name}")
        self.name = name


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDesc(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def prop(device: int = 0, *, exportable: bool = False, rdma: bool = False) -> AllocationProp:
    made = AllocationProp(type=1, handle_types=POSIX_FD if exportable else 0)
    made.location = Location(1, device)
    made.flags.rdma = int(rdma)
    return made


class Driver:
    """One loaded library. Integers are passed as 64 bits, which every parameter here survives."""

    def __init__(self, path: Path | None = None) -> None:
        self.lib = ctypes.CDLL(str(path or library()))
        for name in (
            "count",
            "live_ranges",
            "live_handles",
            "live_allocations",
            "live_mappings",
            "used_bytes",
            "process_bytes",
        ):
            getattr(self.lib, f"kvsim_{name}").restype = ctypes.c_uint64

    def ask(self, function: str, *arguments: Any) -> str:
        """Calls and returns the result's name."""
        passed = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        code = getattr(self.lib, function)(*passed)
        text = ctypes.c_char_p()
        self.lib.cuGetErrorName(code, ctypes.byref(text))
        return text.value.decode() if text.value else str(code)

    def call(self, function: str, *arguments: Any) -> None:
        """Calls; raises CudaError for anything but success."""
        result = self.ask(function, *arguments)
        if result != "CUDA_SUCCESS":
            raise CudaError(function, result)

    def get(self, function: str, *arguments: Any, kind: Any = ctypes.c_uint64) -> Any:
        """Calls with a place for the first parameter; returns what stands there then."""
        value = kind()
        self.call(function, ctypes.byref(value), *arguments)
        return getattr(value, "value", value)

    def uuid(self, device: int) -> str:
        return bytes(self.get("cuDeviceGetUuid_v2", device, kind=ctypes.c_ubyte * 16)).hex()

    def start(self, device: int = 0) -> Driver:
        """cuInit, and the primary context of `device` current."""
        self.call("cuInit", 0)
        self.call("cuCtxSetCurrent", self.get("cuDevicePrimaryCtxRetain", device))
        return self

    def count(self, name: str) -> int:
        return int(self.lib.kvsim_count(name.encode()))

    def fail(self, plan: str) -> None:
        assert self.lib.kvsim_fail(plan.encode()) == 0, plan

    def live(self) -> dict[str, int]:
        names = ("ranges", "handles", "allocations", "mappings")
        return {name: int(getattr(self.lib, f"kvsim_live_{name}")()) for name in names}

    def reserve(self, bytes_: int, alignment: int = 0, hint: int = 0) -> int:
        return int(self.get("cuMemAddressReserve", bytes_, alignment, hint, 0))

    def create(self, bytes_: int = PAGE, device: int = 0, **options: bool) -> int:
        place = ctypes.byref(prop(device, **options))
        return int(self.get("cuMemCreate", bytes_, place, 0))

    def map(self, address: int, handle: int, bytes_: int = PAGE) -> None:
        self.call("cuMemMap", address, bytes_, 0, handle, 0)

    def set_access(
        self, address: int, bytes_: int = PAGE, *, device: int = 0, flags: int = READWRITE
    ) -> None:
        self.call("cuMemSetAccess", address, bytes_, self.access(device, flags), 1)

    @staticmethod
    def access(device: int = 0, flags: int = READWRITE) -> Any:
        return ctypes.byref(AccessDesc(Location(1, device), flags))

    def mapped(self, pages: int = 1, bytes_: int = PAGE) -> tuple[int, list[int]]:
        """A range of `pages` mapped pages with access: its address and its handles."""
        address = self.reserve(pages * bytes_)
        handles = [self.create(bytes_) for _ in range(pages)]
        for i, handle in enumerate(handles):
            self.map(address + i * bytes_, handle, bytes_)
        self.set_access(address, pages * bytes_)
        return address, handles

    def memory_info(self) -> tuple[int, int]:
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def free_bytes(self) -> int:
        return self.memory_info()[0]


class Child:
    """`body(channel)` in a forked process; what it returns must be JSON."""

    def __init__(self, body: Callable[[socket.socket], Any], environment: dict[str, str]) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(DEADLINE_S)
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns where other tests of the session left threads; the child uses none.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            self.channel.close()
            _run_child(body, theirs, environment, writing)
        os.close(writing)
        theirs.close()
        self._answer = reading
        self.signal: int | None = None

    def result(self) -> Any:
        """Waits for the end. Raises AssertionError with the child's traceback if it failed."""
        with os.fdopen(self._answer, "rb") as answer:
            text = answer.read()
        self._reap()
        assert self.signal is None, f"killed by {self.signal}"
        said = json.loads(text)
        if "error" in said:
            raise AssertionError(said["error"])
        return said["result"]

    def killed_by(self) -> int | None:
        """Waits for the end; the number of the signal that ended it, or None."""
        with os.fdopen(self._answer, "rb") as answer:
            answer.read()
        self._reap()
        return self.signal

    def kill(self) -> None:
        """SIGKILL, and the wait for it: the process is gone afterwards."""
        os.kill(self.pid, signal.SIGKILL)
        self.killed_by()

    def _reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.channel.close()
        self.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def _run_child(
    body: Callable[[socket.socket], Any],
    channel: socket.socket,
    environment: dict[str, str],
    answer: int,
) -> None:
    faulthandler.disable()  # a touch that faults is what some tests are for
    try:
        for name in [name for name in os.environ if name.startswith("KVSIM_")]:
            del os.environ[name]
        os.environ.update(environment)
        channel.settimeout(DEADLINE_S)
        said: dict[str, Any] = {"result": body(channel)}
    except BaseException:
        said = {"error": traceback.format_exc()}
    try:
        os.write(answer, json.dumps(said).encode())
    finally:
        os._exit(0)  # whatever happened: a child must never go on as the test session


def start(body: Callable[[socket.socket], Any], **environment: str) -> Child:
    """Starts `body(channel)` in a child with this environment and nothing else of KVSIM_*."""
    library()
    return Child(body, environment)


def run(body: Callable[[], Any], **environment: str) -> Any:
    """`body()` in a child, and its result."""
    return start(lambda _channel: body(), **environment).result()
