"""What a worker's process holds of a GPU that others use too.

vLLM sizes its cache, and judges its sleep, by the memory that is free on the *device*: beside a
neighbour that grows and shrinks, these figures say nothing of vLLM itself. So while vLLM measures,
"free" is answered as if this process were alone: the total less `own_bytes`.

    first = look(...)       # before anything is loaded
    ...
    own_bytes(first, look(...))
"""

from __future__ import annotations

from typing import Final, NamedTuple

LIBRARIES_BYTES: Final = 256 << 20
"""What a process may have grown by outside torch. On an H100 (driver 580, torch 2.11) a context of
527 MiB grew by 94 MiB with the first kernel, 30 with cuBLAS and 104 with a CUDA graph: 228."""


class Seen(NamedTuple):
    """One look at a GPU, all in bytes."""

    used: int
    """Of the device, by whomever."""
    reserved_by_torch: int
    """By this process's caching allocator: weights, activations, graphs."""
    of_instances: int
    """Granted to and reserved by the instances of the device's ledger."""
    of_process: int | None = None
    """Of this process by NVML's figure, without KV cache; None: NVML does not say."""


def own_bytes(first: Seen, now: Seen) -> int:
    """What this process has come to hold since `first`; its bare context is not in it.

    NVML tells it for each process, where it can be asked. Else torch's allocator is exact, and what
    lies outside it (libraries' buffers, modules) is the growth of the device's use that neither
    torch nor the ledger explains. Others that start beside this one grow, too, so it is never more
    than libraries take. Where others have given more back than that, it counts as none. Too little
    does no harm: what is used and not reserved counts as strangers'.
    """
    if first.of_process is not None and now.of_process is not None:
        return max(0, now.of_process - first.of_process)
    outside = min(max(0, _unexplained(now) - _unexplained(first)), LIBRARIES_BYTES)
    return max(0, now.reserved_by_torch - first.reserved_by_torch + outside)


def _unexplained(seen: Seen) -> int:
    # A neighbour that starts has reserved its weights before it loads them: what is not used yet
    # must not make room in the first look for what is used in the next.
    return max(0, seen.used - seen.reserved_by_torch - seen.of_instances)
