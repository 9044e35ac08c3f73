"""The ledgers of all devices on which an instance's pages lie: joined together, or not at all.

    joined = join_all([gpu0, gpu0, gpu1], group="default", name=..., uuid=..., copy_bytes=2 << 20)
    joined.places          # for a native pool: what is granted, asked and reserved on all of them
    joined.close()

Rank i has its pages on the i-th device. See vmm_csrc/ledger/places.h for the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvelastic import _vmm, ledger, page_size
from kvelastic.config import Config
from kvelastic.device import Device
from kvelastic.errors import InvalidArgumentError, LedgerError


class JoinedPlaces:
    """This process's places in the ledgers of its devices. Made by `join_all`."""

    def __init__(self, ledgers: Sequence[ledger.JoinedLedger], places: _vmm.Places) -> None:
        self.ledgers = tuple(ledgers)
        """One for each device, in the order of their names."""
        self.places = places

    def reserve(self, size_bytes: int | Mapping[str, int]) -> None:
        """Say what is held besides KV cache, by device; one number where there is one device.

        Devices that are not named keep what they have. Waits and raises as `_vmm.Places.reserve`.
        """
        if isinstance(size_bytes, int):
            if len(self.ledgers) > 1 and size_bytes:
                raise InvalidArgumentError(
                    f"{size_bytes} bytes to reserve are given for {len(self.ledgers)} devices; say"
                    " how many for each: {device name: bytes}"
                )
            ((device, _), *_others) = self.places.devices
            size_bytes = {device: size_bytes}
        self.places.reserve(dict(size_bytes))

    def close(self) -> None:
        """Leave all ledgers. Repeatable; waits for nobody."""
        for one in reversed(self.ledgers):
            one.close()

    def linger(self) -> None:
        """Keep what is granted until the processes that hold its memory have ended."""
        for one in self.ledgers:
            one.member.linger()
            one.linger()


def copies_by_device(devices: Sequence[Device]) -> list[tuple[str, int]]:
    """(name, copies of each page) of every device, in the order of the ranks."""
    names = [device.name for device in devices]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def capacity_bytes(devices: Sequence[Device]) -> int:
    """What an instance could hold on all of them together, if it were alone there.

    Raises `InvalidArgumentError` for no device.
    """
    if not devices:
        raise InvalidArgumentError("no device is given; name one for each rank")
    of_name = {device.name: device.capacity_bytes for device in devices}
    return min(of_name[name] * len(devices) // copies for name, copies in copies_by_device(devices))


def page_size_bytes(settings: Config, devices: Sequence[Device]) -> int:
    """The page size in bytes that `PageLayout.solve` starts from, on all of these devices.

    `KVELASTIC_PAGE_SIZE_MB` if it is set; else the largest default size of the GPUs among them,
    which each GPU's ledger keeps. With a handle for each buffer, a page is many handles: they stay
    small.
    """
    gpus = {device.name: device for device in devices if not device.is_host}
    if settings.page_size_mb is not None or not settings.contiguous_layout or not gpus:
        return settings.page_size_bytes
    return min(
        max(_default_page_bytes(gpu, settings.ledger) for gpu in gpus.values()),
        page_size.most_bytes(min(device.capacity_bytes for device in devices)),
    )


def _default_page_bytes(gpu: Device, group: str) -> int:
    own_bytes = page_size.for_price(gpu.page_price_us, gpu.capacity_bytes)
    try:
        return ledger.decide_page_bytes(
            gpu.name,
            group=group,
            capacity_bytes=gpu.capacity_bytes,
            total_bytes=gpu.total_bytes,
            page_bytes=own_bytes,
        )
    except LedgerError:
        return own_bytes  # the join that follows raises it too


def join_all(
    devices: Sequence[Device],
    *,
    group: str,
    name: str,
    uuid: bytes,
    copy_bytes: int,
    min_bytes: int = 0,
    reserve_bytes: int | Mapping[str, int] = 0,
    priority: int = 0,
) -> JoinedPlaces:
    """Become a member of every device's ledger; `copy_bytes` is what a page takes for one rank.

    The guarantee is of all devices together, and divided among them by copies. Raises as
    `ledger.join`, `InvalidArgumentError` for no device; then it is in no ledger.
    """
    by_name = {device.name: device for device in devices}
    joined: list[ledger.JoinedLedger] = []
    try:
        places = []
        # Everybody in the same order: of two that start at once one is ahead on all devices.
        for device in (by_name[key] for key in sorted(by_name)):
            one = ledger.join(
                device.name,
                group=group,
                capacity_bytes=device.capacity_bytes,
                total_bytes=device.total_bytes,
                name=name,
                uuid=uuid,
                priority=priority,
            )
            joined.append(one)
            ranks = [rank for rank, its in enumerate(devices) if its.name == device.name]
            places.append((one.member, ranks))
        made = JoinedPlaces(joined, _vmm.Places(places, copy_bytes))
        made.places.set_min(min_bytes)
        made.reserve(reserve_bytes)
    except BaseException:
        for one in reversed(joined):
            one.close()
        raise
    return made
