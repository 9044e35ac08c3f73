"""The kinds of stores that the battery runs over, and how each one's medium is made to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from mooncake_stand_in import Server, StandIn
from store_battery import RECORD_BYTES, ROOM, Kind

from kvelastic import _vmm, device
from kvelastic.config import load
from kvelastic.device import Device
from kvelastic.tiers.base import Store
from kvelastic.tiers.host import HostStore
from kvelastic.tiers.remote import MooncakeStore

PAGE_BYTES = 2 << 20

# --- host -----------------------------------------------------------------------------------------

_drivers: list[_vmm.FaultDriver] = []
"""The driver of the newest host store."""


def open_host(_: Path) -> Store:
    def driver() -> _vmm.Driver:
        _drivers[:] = [_vmm.FaultDriver(_vmm.HostDriver())]
        return _drivers[0]

    settings = load()
    machine = device.host(settings)
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

# --- mooncake, over a client that needs no server -------------------------------------------------

_servers: list[Server] = []
"""The server of the newest store."""


class Clock:
    """Seconds that pass when they are read: no failure is waited for."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 3600.0
        return self.now_s


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
    failing=failing_mooncake,
    before_visible=mooncake_write_seen,
)

KINDS = [HOST, MOONCAKE]
