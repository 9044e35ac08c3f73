"""The device whose memory an instance uses: the host or a GPU.

device = resolve("auto", settings)  # cpu, host, cuda, cuda:1, GPU-<uuid>, MIG-<uuid>
memory = reserve_range(device.driver(), geometry, guard_pages=settings.guard_pages)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvelastic import _vmm
from kvelastic.device import page_size
from kvelastic.device.host_memory import machine_memory_bytes
from kvelastic.errors import DeviceUnavailableError, InvalidArgumentError
from kvelastic.logs import log_once

if TYPE_CHECKING:
    from kvelastic.config import Config

_log = logging.getLogger("kvelastic")

HOST: Final = "host"
_HOST_NAMES: Final = ("cpu", HOST)
AUTO: Final = "auto"
_GPU_PREFIXES: Final = ("cuda", "GPU-", "MIG-")


@dataclass(frozen=True)
class Device:
    """One device, as seen by this process."""

    name: str
    """`host`, or the UUID of the GPU or MIG instance: the same in every process."""
    capacity_bytes: int
    """Memory that the instances may hold together; no limit exceeds it."""
    driver: Callable[[], _vmm.Driver]
    """Opens its driver; only a process that maps pages needs it."""
    total_bytes: int = 0
    """Total memory, if the capacity is only the part for KV caches (the host). Reserves use the
    memory outside the capacity first. 0: reserves use the capacity (a GPU)."""

    page_price_us: float = 0.0
    """Cost of a handle in its driver, from creation to destruction (`page_size`); 0: not measured.
"""

    @property
    def is_host(self) -> bool:
        """Whether its memory is host memory."""
        return self.name == HOST


def host(settings: Config) -> Device:
    """Return the host device, with the capacity of `KVELASTIC_HOST_MEMORY`."""
    if settings.gpu_utilization != type(settings).gpu_utilization:
        log_once(
            logging.WARNING,
            f"KVELASTIC_GPU_UTILIZATION={settings.gpu_utilization:g} is of GPUs and does nothing"
            " for host memory; set KVELASTIC_HOST_MEMORY.",
        )
    return Device(HOST, settings.host_memory_bytes, _vmm.HostDriver, machine_memory_bytes())


def resolve(name: str, settings: Config) -> Device:
    """Return the device called `name`; `auto` means a GPU if there is one, else the host.

    Opens a GPU, which creates its primary context. A GPU's capacity is `KVELASTIC_GPU_UTILIZATION`
    of its memory; its ledger accounts for memory of other processes. Raises
    `DeviceUnavailableError` for a GPU that is not available, and `InvalidArgumentError` for another
    name.
    """
    if name in _HOST_NAMES:
        return host(settings)
    if name == AUTO:
        try:
            return _gpu("cuda", settings)
        except DeviceUnavailableError as error:
            _log.info("Using the host's memory: %s.", error)
            return host(settings)
    if name.startswith(_GPU_PREFIXES):
        return _gpu(name, settings)
    raise _not_accepted(name)


def _not_accepted(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"device={name!r} is not accepted; it must be cpu, host, auto, cuda, cuda:N, GPU-<uuid> or"
        " MIG-<uuid>"
    )


def _gpu(name: str, settings: Config) -> Device:
    driver = _vmm.CudaDriver(name)
    capacity_bytes = int(driver.total_bytes * settings.gpu_utilization)
    price_us = page_size.price_us(settings, driver)
    return Device(driver.uuid, capacity_bytes, lambda: driver, page_price_us=price_us)


def reserve_range(driver: _vmm.Driver, geometry: _vmm.Geometry, *, guard_pages: bool) -> _vmm.Range:
    """Reserve addresses in this process; with `guard_pages`, unmapped pages read scratch memory.

    Raises `DriverError` if no addresses are left, or no memory for the scratch page.
    """
    if guard_pages:
        _log.warning(
            "KVELASTIC_GUARD_PAGES is on: kernels that read too far are not found out, and pages"
            " cost twice as many driver calls."
        )
        driver = _vmm.GuardDriver(driver, geometry.extent_bytes)
    return _vmm.Range.reserve(driver, geometry)


def means_host(device: object) -> bool | None:
    """Return whether an engine's device (`"cpu"`, a torch.device) is the host; None if unspecified.

    Raises `InvalidArgumentError` for an unknown device.
    """
    text = str(device)
    if device is None or text == AUTO:
        return None
    if text in _HOST_NAMES:
        return True
    if text.startswith(_GPU_PREFIXES):
        return False
    raise _not_accepted(text)
