"""How much of a shared GPU a worker's process uses itself.

vLLM sizes its cache, and checks its sleep, by the *device's* free memory. Beside a neighbour that
grows and shrinks, that number does not describe vLLM. While vLLM measures, kvelastic reports free
memory as if this process were alone: the total minus `own_bytes`.
    first = look(...)       # before anything is loaded
    ...
    own_bytes(first, look(...))
"""

from __future__ import annotations

from typing import Final, NamedTuple

LIBRARIES_BYTES: Final = 256 << 20
"""Upper bound of a process's growth outside torch. On an H100 (driver 580, torch 2.11) a context of
527 MiB grew by 94 MiB with the first kernel, 30 with cuBLAS and 104 with a CUDA graph: 228."""


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
