"""What a worker's process holds of a GPU that others use too.

vLLM sizes its cache, and judges its sleep, by the memory that is free on the *device*: beside a
neighbour that grows and shrinks, these figures say nothing of vLLM itself. So while vLLM measures,
"free" is answered as if this process were alone: the total less `own_bytes`.

    first = look(...)       # before anything is loaded
    ...
    own_bytes(first, look(...))
"""

from __future__ import annotations

from typing import NamedTuple


class Seen(NamedTuple):
    """One look at a GPU, all in bytes."""

    used: int
    """Of the device, by whomever."""
    reserved_by_torch: int
    """By this process's caching allocator: weights, activations, graphs."""
    of_instances: int
    """Granted to and reserved by the instances of the device's ledger."""


def own_bytes(first: Seen, now: Seen) -> int:
    """What this process has come to hold since `first`.

    The allocator's own figure is exact. What lies outside it (libraries' buffers, modules) no
    driver tells for one process, so it is the growth of the device's use that neither torch nor the
    ledger explains. Where others have given more back than that, it counts as none: a cache is
    addresses, and a few too many cost nothing.
    """
    outside = _unexplained(now) - _unexplained(first)
    return max(0, now.reserved_by_torch - first.reserved_by_torch + max(0, outside))


def _unexplained(seen: Seen) -> int:
    # A neighbour that starts has reserved its weights before it loads them: what is not used yet
    # must not make room in the first look for what is used in the next.
    return max(0, seen.used - seen.reserved_by_torch - seen.of_instances)
