"""Which of a GPU's processes this one is, and what it holds there, by NVML.

In a container NVML's pids are the host's, and there are drivers that say 0 bytes of every process.
So nothing is believed of a pid: this process takes an allocation of a known size, and is the one
whose figure rises by just that, and falls again.

    pid = find(driver, name)                # None: NVML does not say
    held_bytes = processes(name).get(pid)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from kvelastic import _vmm, nvml
from kvelastic.devices import device_key, list_gpus
from kvelastic.errors import DriverError

_log = logging.getLogger("kvelastic.vllm")

_GRANULES: Final = 33
"""Of the allocation: 66 MiB, which others do not take or give back by chance."""
_TRIES: Final = 3


def find(driver: _vmm.Driver, name: str) -> int | None:
    """The number that NVML has for this process on the GPU of that UUID; milliseconds.

    None where NVML is not there, does not tell, or tells of two that may be this one, and where the
    device has no memory to try it with.
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
    _log.debug("NVML does not say what this process holds of %s.", name)
    return None


def one_that_held(
    size_bytes: int, before: Mapping[int, int], during: Mapping[int, int], after: Mapping[int, int]
) -> int | None:
    """The process that held so much more in between, if there is just one; bytes by pid."""
    found = [
        pid
        for pid, held_bytes in during.items()
        if held_bytes - before.get(pid, 0) == held_bytes - after.get(pid, 0) == size_bytes
    ]
    return found[0] if len(found) == 1 else None


def processes(name: str) -> dict[int, int]:
    """What each process holds of the GPU of that UUID, by NVML's number for it."""
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
