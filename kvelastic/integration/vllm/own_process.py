"""Finds this process in NVML's list of a GPU's processes, and its memory there.

In a container NVML reports the host's pids, and some drivers report 0 bytes for every process. So
kvelastic does not trust pids. It makes an allocation of a known size; the process whose memory
rises by exactly that size and falls again is this one.

    pid = find(driver, name)                # None: NVML does not report it
    held_bytes = processes(name).get(pid)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from kvelastic import _vmm
from kvelastic.device import nvml
from kvelastic.device.machine import device_key, list_gpus
from kvelastic.errors import DriverError

_log = logging.getLogger("kvelastic.vllm")

_GRANULES: Final = 33
"""Size of the allocation, 66 MiB, which another process is unlikely to allocate and free."""
_TRIES: Final = 3


def find(driver: _vmm.Driver, name: str) -> int | None:
    """Return NVML's pid of this process on the GPU with that UUID. Takes milliseconds.

    Returns None if NVML is missing or reports nothing, if two processes match, or if the device
    has no memory for the test allocation.
    """
    size_bytes = driver.granularity_bytes * _GRANULES
    for _ in range(_TRIES):
        before = processes(name)
        if not before:
            break
        try:
            handle = driver.create(size_bytes)
            during = processes(name)
            driver.destroy(handle, size_bytes)
        except DriverError as error:
            _log.debug("NVML was not queried about this process: %s", error)
            break
        pid = one_that_held(size_bytes, before, during, processes(name))
        if pid is not None:
            return pid
    _log.debug("NVML does not report this process's memory on %s.", name)
    return None


def one_that_held(
    size_bytes: int, before: Mapping[int, int], during: Mapping[int, int], after: Mapping[int, int]
) -> int | None:
    """Return the only pid that held `size_bytes` more in between, or None. Inputs: bytes by pid."""
    found = [
        pid
        for pid, held_bytes in during.items()
        if held_bytes - before.get(pid, 0) == held_bytes - after.get(pid, 0) == size_bytes
    ]
    return found[0] if len(found) == 1 else None


def processes(name: str) -> dict[int, int]:
    """Return each process's bytes on the GPU with that UUID, by NVML's pid."""
    library = nvml.find()
    if library is None:
        return {}
    gpus, _ = list_gpus(library, lambda pid: None)
    return {
        process.pid: process.used_bytes
        for gpu in gpus
        if gpu.key == device_key(name)
        for process in gpu.processes or ()
        if process.used_bytes is not None
    }
