"""The ledgers of the devices that hold an instance's pages. The instance joins all or none.

    joined = join_all([gpu0, gpu0, gpu1], group="default", name=..., uuid=..., copy_bytes=2 << 20)
    joined.device_set          # for a native pool: grants, requests and reserves on these devices
    joined.close()

Rank i has its pages on `devices[i]`. See vmm_csrc/ledger/device_set.h for the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.device import page_size
from kvelastic.device.selection import Device
from kvelastic.errors import InvalidArgumentError, LedgerError
from kvelastic.shared import ledger


class JoinedDevices:
    """This process's memberships in the ledgers of its devices. Returned by `join_all`."""

    def __init__(self, ledgers: Sequence[ledger.JoinedLedger], device_set: _vmm.DeviceSet) -> None:
        self.ledgers = tuple(ledgers)
        """One for each device, sorted by device name."""
        self.device_set = device_set

    def reserve(self, size_bytes: int | Mapping[str, int]) -> None:
        """Set the memory held besides KV cache, in bytes by device name.

        A number is enough for one device. Other devices keep their reserves. Blocks and raises like
        `_vmm.DeviceSet.reserve`.
        """
        if isinstance(size_bytes, int):
            if len(self.ledgers) > 1 and size_bytes:
                raise InvalidArgumentError(
                    f"{size_bytes} bytes to reserve are given for {len(self.ledgers)} devices; say"
                    " how many for each: {device name: bytes}"
                )
            ((device, _), *_others) = self.device_set.devices
            size_bytes = {device: size_bytes}
        self.device_set.reserve(dict(size_bytes))

    def close(self) -> None:
        """Leave the ledgers. Idempotent. Never blocks."""
        for one in reversed(self.ledgers):
            one.close()

    def linger(self) -> None:
        """Keep the grants until the processes that hold the memory have ended."""
        for one in self.ledgers:
            one.member.linger()
            one.linger()


def copies_by_device(devices: Sequence[Device]) -> list[tuple[str, int]]:
    """Return (name, copies of each page) of every device, in the order of the ranks."""
    names = [device.name for device in devices]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def capacity_bytes(devices: Sequence[Device]) -> int:
    """Return the bytes that an instance could hold on these devices if it were alone there.

    Raises `InvalidArgumentError` if no device is given.
    """
    if not devices:
        raise InvalidArgumentError("no device is given; name one for each rank")
    of_name = {device.name: device.capacity_bytes for device in devices}
    return min(of_name[name] * len(devices) // copies for name, copies in copies_by_device(devices))


def page_size_bytes(settings: Config, devices: Sequence[Device]) -> int:
    """Return the page size in bytes from which `PageLayout.solve` starts, for these devices.

    `KVELASTIC_PAGE_SIZE_MB` if it is set. Else the largest default size of the GPUs among the
    devices; each GPU's ledger keeps its default. Without the contiguous layout, each page has one
    handle per buffer, so its size stays small.
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
        return own_bytes  # the following join raises it too


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
) -> JoinedDevices:
    """Join the ledger of every device; `copy_bytes` is the size of a page for one rank.

    The guarantee `min_bytes` covers all devices and is divided among them by copies. Raises the
    errors of `ledger.join`, and `InvalidArgumentError` if no device is given. On error, the process
    is in no ledger.
    """
    by_name = {device.name: device for device in devices}
    joined: list[ledger.JoinedLedger] = []
    try:
        placements = []
        # Every process joins in the same order. So of two that start at once, one is first on all
        # devices.
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
            placements.append((one.member, ranks))
        made = JoinedDevices(joined, _vmm.DeviceSet(placements, copy_bytes))
        made.device_set.set_min(min_bytes)
        made.reserve(reserve_bytes)
    except BaseException:
        for one in reversed(joined):
            one.close()
        raise
    return made
