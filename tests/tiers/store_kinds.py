"""The kinds of stores that the battery runs over, and how each one's medium is made to fail."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from failing_store import FailingStore
from mooncake_stand_in import Server, StandIn
from store_battery import RECORD_BYTES, ROOM, WORLD, Kind

from kvelastic import _vmm
from kvelastic.config import load
from kvelastic.device import selection
from kvelastic.device.selection import Device
from kvelastic.tiers.base import Store
from kvelastic.tiers.stores.disk.store import DiskStore
from kvelastic.tiers.stores.folder.store import FolderStore
from kvelastic.tiers.stores.host.store import HostStore
from kvelastic.tiers.stores.identified import IdentifiedStore
from kvelastic.tiers.stores.mooncake.store import MooncakeStore

PAGE_BYTES = 2 << 20
DISK_BYTES = 10 << 20


class Clock:
    """Seconds that pass when they are read: no failure is waited for."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 3600.0
        return self.now_s


# --- host -----------------------------------------------------------------------------------------

_drivers: list[_vmm.FaultDriver] = []
"""The driver of the newest host store."""


def open_host(_: Path) -> Store:
    def driver() -> _vmm.Driver:
        _drivers[:] = [_vmm.FaultDriver(_vmm.HostDriver())]
        return _drivers[0]

    settings = load()
    machine = selection.host(settings)
    place = Device(machine.name, machine.capacity_bytes, driver, machine.total_bytes)
    pages = -(-(ROOM + 1) * RECORD_BYTES // PAGE_BYTES)
    return HostStore(RECORD_BYTES, pages * PAGE_BYTES, settings=settings, on=place)


@contextmanager
def failing_host(turn: int) -> Iterator[Callable[[], int]]:
    (driver,) = _drivers
    driver.arm(turn)
    yield lambda: driver.calls
    driver.arm(0)


@contextmanager
def host_write_seen(look: Callable[[], None]) -> Iterator[None]:
    write = _vmm.write_blocks

    def write_and_look(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        look()

    with mock.patch.object(_vmm, "write_blocks", write_and_look):
        yield


HOST = Kind(
    "host",
    open_host,
    failing=failing_host,
    counts_errors=False,
    before_visible=host_write_seen,
)

# --- one that fails -------------------------------------------------------------------------------

_failing: list[FailingStore] = []
"""The newest one."""


def open_failing(folder: Path) -> Store:
    _failing[:] = [FailingStore(open_host(folder))]
    return _failing[0]


@contextmanager
def failing_store(turn: int) -> Iterator[Callable[[], int]]:
    (store,) = _failing
    store.fail_at(turn)
    yield lambda: store.calls
    store.fail_at(0)


FAILING = Kind("failing", open_failing, failing=failing_store, before_visible=host_write_seen)

# --- disk -----------------------------------------------------------------------------------------


class FailingFiles:
    """Reads and writes records of files; one record of them can be told to fail."""

    def __init__(self) -> None:
        self._io = _vmm.RecordIo("auto", 4)
        self.after_write: Callable[[], None] = lambda: None
        self.calls = 0
        self._fail_at = 0

    def fail_at(self, turn: int) -> None:
        """The turn-th record from now on is not read, or not written; 0: none."""
        self.calls, self._fail_at = 0, turn

    def _judged(self, answers: list[tuple[int, int]]) -> list[tuple[int, int]]:
        judged = []
        for answer in answers:
            self.calls += 1
            judged.append((-errno.EIO, 0) if self.calls == self._fail_at else answer)
        return judged

    def write(
        self, places: Sequence[tuple[int, int]], views: Sequence[object], keys: bytes
    ) -> list[tuple[int, int]]:
        answers = self._io.write(places, views, keys)
        self.after_write()
        return self._judged(answers)

    def read(
        self, places: Sequence[tuple[int, int]], views: Sequence[object], keys: bytes
    ) -> list[tuple[int, int]]:
        return self._judged(self._io.read(places, views, keys))


_files: list[FailingFiles] = []
"""What the newest disk store reads and writes with."""


def open_disk(folder: Path) -> Store:
    _files[:] = [FailingFiles()]
    files: Any = _files[0]
    return DiskStore([folder / "kv"], RECORD_BYTES, DISK_BYTES, WORLD, io=files, clock=Clock())


@contextmanager
def failing_disk(turn: int) -> Iterator[Callable[[], int]]:
    (files,) = _files
    files.fail_at(turn)
    yield lambda: files.calls
    files.fail_at(0)


@contextmanager
def disk_write_seen(look: Callable[[], None]) -> Iterator[None]:
    _files[0].after_write = look
    yield
    _files[0].after_write = lambda: None


DISK = Kind("disk", open_disk, survives=True, failing=failing_disk, before_visible=disk_write_seen)

# --- folder ---------------------------------------------------------------------------------------


class FailingCalls:
    """Calls to the file system; one of them can be told to fail."""

    NAMES = ("open", "mkdir", "writev", "rename", "readv", "read", "stat")

    def __init__(self, fail_at: int) -> None:
        self.calls = 0
        self._fail_at = fail_at
        self._lock = threading.Lock()

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            if "dir_fd" not in more and call.__name__ in ("open", "mkdir", "stat"):
                return call(*arguments, **more)  # of Python's own
            with self._lock:
                self.calls += 1
                fails = self.calls == self._fail_at
            if fails:
                raise OSError(errno.EIO, "the disk is broken")
            return call(*arguments, **more)

        return counted


def open_folder(folder: Path) -> Store:
    return FolderStore(folder / "shared", RECORD_BYTES, WORLD, clock=Clock())


@contextmanager
def failing_folder(turn: int) -> Iterator[Callable[[], int]]:
    failing = FailingCalls(turn)
    with ExitStack() as patches:
        for name in FailingCalls.NAMES:
            patches.enter_context(mock.patch.object(os, name, failing.wrap(getattr(os, name))))
        yield lambda: failing.calls


@contextmanager
def folder_write_seen(look: Callable[[], None]) -> Iterator[None]:
    write = os.writev

    def write_and_look(*arguments: Any) -> int:
        written = write(*arguments)
        look()
        return written

    with mock.patch.object(os, "writev", write_and_look):
        yield


FOLDER = Kind(
    "folder",
    open_folder,
    is_bounded=False,
    survives=True,
    failing=failing_folder,
    before_visible=folder_write_seen,
)

# --- mooncake, over a client that needs no server -------------------------------------------------

_servers: list[Server] = []
"""The server of the newest store."""


def open_mooncake(_: Path) -> Store:
    _servers[:] = [Server()]
    server = _servers[0]
    return MooncakeStore(
        "nowhere:1", RECORD_BYTES, make_client=lambda: StandIn(server), clock=Clock()
    )


@contextmanager
def failing_mooncake(turn: int) -> Iterator[Callable[[], int]]:
    (server,) = _servers
    server.fail_at(turn)
    yield lambda: server.calls
    server.fail_at(0)


@contextmanager
def mooncake_write_seen(look: Callable[[], None]) -> Iterator[None]:
    _servers[0].on_write = look
    yield
    _servers[0].on_write = lambda: None


MOONCAKE = Kind(
    "mooncake",
    open_mooncake,
    is_bounded=False,
    refuses_limits=True,
    knows_ages=False,
    failing=failing_mooncake,
    before_visible=mooncake_write_seen,
)

# --- stores of weights that were hashed -----------------------------------------------------------


def identified(kind: Kind) -> Kind:
    """The same store behind an identity of weights."""

    def open_identified(folder: Path) -> Store:
        store = IdentifiedStore(kind.open(folder))
        store.enter(WORLD)
        store.identify("weights")
        return store

    return replace(kind, name=f"identified {kind.name}", open=open_identified)


KINDS = [HOST, FAILING, DISK, FOLDER, MOONCAKE, identified(DISK), identified(MOONCAKE)]
