"""How much of a shared GPU a worker's process uses itself.

vLLM sizes its cache, and checks its sleep, by the *device's* free memory. Beside a neighbour that
grows and shrinks, that number does not describe vLLM. While vLLM measures, kvelastic reports free
memory as if this process were alone: the total minus `own_bytes`.

    first = Seen(...)                       # before anything is loaded
    own_bytes(first, Seen(...))             # now
    pid = find_pid(driver, name)            # of this process in NVML's list; None: not there
    held_bytes = processes(name).get(pid)

In a container NVML reports the host's pids, and some drivers report 0 bytes for every process. So
kvelastic does not trust pids. It makes an allocation of a known size; the process whose memory
rises by exactly that size and falls again is this one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from kvelastic import _vmm
from kvelastic.device import nvml
from kvelastic.device.machine import device_key, list_gpus
from kvelastic.errors import DriverError

_log = logging.getLogger("kvelastic.vllm")

LIBRARIES_BYTES: Final = 256 << 20
"""Upper bound of a process's growth outside torch. On an H100 (driver 580, torch 2.11) a context of
527 MiB grew by 94 MiB with the first kernel, 30 with cuBLAS and 104 with a CUDA graph: 228."""
_GRANULES: Final = 33
"""Size of the allocation, 66 MiB, which another process is unlikely to allocate and free."""
_TRIES: Final = 3


class Seen(NamedTuple):
    """One measurement of a GPU, all in bytes."""

    used: int
    """Used on the device, by all processes."""
    reserved_by_torch: int
    """Reserved by this process's caching allocator: weights, activations, graphs."""
    of_instances: int
    """Granted to and reserved by the instances in the device's ledger."""
    of_process: int | None = None
    """This process's use as NVML reports it, without KV cache; None if NVML does not report it."""


def own_bytes(first: Seen, now: Seen) -> int:
    """Return the bytes that this process has allocated since `first`, without its bare context.

    Uses NVML's per-process value where it exists. Otherwise torch's allocator is exact for torch's
    part. The rest (library buffers, modules) is the growth of device use that neither torch nor the
    ledger explains. That growth may include other starting processes, so it is capped at
    `LIBRARIES_BYTES`; if it is negative, it counts as 0. A value that is too low does no harm:
    memory that is used and not reserved counts as unmanaged.
    """
    if first.of_process is not None and now.of_process is not None:
        return max(0, now.of_process - first.of_process)
    outside = min(max(0, _unexplained(now) - _unexplained(first)), LIBRARIES_BYTES)
    return max(0, now.reserved_by_torch - first.reserved_by_torch + outside)


def _unexplained(seen: Seen) -> int:
    # A starting neighbour reserves its weights before it loads them. Reserved but unused memory in
    # the first measurement must not offset memory that is used in the next.
    return max(0, seen.used - seen.reserved_by_torch - seen.of_instances)


def find_pid(driver: _vmm.Driver, name: str) -> int | None:
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
