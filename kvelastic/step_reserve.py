"""What an engine of one process reserves of a GPU besides its KV cache, as its steps show it.

    reserve = StepReserve(pool.reserve, device.capacity_bytes)
    reserve.begin(held_bytes)       # weights, and room for a first step
    reserve.follow(held_bytes)      # after each step: what the process holds by then

A step's activations come and go. A neighbour's cache may take what they leave between two steps,
and the next step would meet a full device; so room for the largest step stays reserved. Imports no
torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from kvelastic.errors import GuaranteeError, ReserveError
from kvelastic.sizes import format_size

_log = logging.getLogger("kvelastic")

_MOST_FOR_A_STEP_BYTES: Final = 2 << 30
_PART_FOR_A_STEP: Final = 32
_PART_AHEAD: Final = 4
"""Of a first step's room, so much is kept free above the largest step that was seen."""


def first_step_bytes(total_bytes: int) -> int:
    """Activations and libraries' buffers of a step that nobody has measured: 1/32 of the GPU, 2 GiB
    at most."""
    return min(_MOST_FOR_A_STEP_BYTES, total_bytes // _PART_FOR_A_STEP)


class StepReserve:
    """See the module. One thread."""

    def __init__(self, reserve: Callable[[int], None], total_bytes: int) -> None:
        """`reserve` is `ElasticPool.reserve`."""
        self._reserve = reserve
        self._step_bytes = first_step_bytes(total_bytes)
        self._tried_bytes = 0

    def begin(self, held_bytes: int) -> int:
        """Reserve what is held now and room for a first step; returns that sum.

        Blocks while others give, five seconds at most. Raises as `ElasticPool.reserve`.
        """
        self._tried_bytes = held_bytes + self._step_bytes
        self._reserve(self._tried_bytes)
        return self._tried_bytes

    def follow(self, held_bytes: int) -> None:
        """Raise the reserve where a step has held more than there is room for; it never falls.

        Blocks as `begin` where it rises. Where others do not give, the log says so and the reserve
        stays: the memory is taken already.
        """
        if held_bytes <= self._tried_bytes:
            return
        self._tried_bytes = held_bytes + self._step_bytes // _PART_AHEAD
        try:
            self._reserve(self._tried_bytes)
        except (GuaranteeError, ReserveError) as error:
            _log.warning(
                "This process holds %s besides its KV cache, and its reserve could not be"
                " raised to that: %s. A step may find the device full. Lower the limit of another"
                " instance, or set KVELASTIC_RESERVE.",
                format_size(held_bytes),
                error,
            )
        else:
            _log.info("%s besides the KV cache are reserved now.", format_size(self._tried_bytes))
