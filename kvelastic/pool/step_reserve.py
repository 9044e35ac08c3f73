"""Reserves the GPU memory that a single-process engine uses besides its KV cache.

    reserve = StepReserve(pool.reserve, device.capacity_bytes)
    reserve.begin(held_bytes)       # weights, and room for a first step
    reserve.follow(held_bytes)      # after each step: the bytes that the process holds by then

Activations are freed between steps. Without a reserve, another instance's cache could take that
memory, and the next step would run out of memory. So room for the largest step stays reserved. Does
not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from kvelastic.errors import GuaranteeError, ReserveError
from kvelastic.units import format_size

_log = logging.getLogger("kvelastic")

_MOST_FOR_A_STEP_BYTES: Final = 2 << 30
_PART_FOR_A_STEP: Final = 32
_PART_AHEAD: Final = 4
"""Keep this part (1/4) of the first step's room free above the largest step seen."""


def first_step_bytes(total_bytes: int) -> int:
    """Return the room for activations and library buffers of a first step: 1/32 of the GPU.

    At most 2 GiB. Used until a step has been measured.
    """
    return min(_MOST_FOR_A_STEP_BYTES, total_bytes // _PART_FOR_A_STEP)


class StepReserve:
    """Keeps the reserve of a process as large as its largest step. Use it from one thread."""

    def __init__(self, reserve: Callable[[int], None], total_bytes: int) -> None:
        """Use `reserve`, which is `ElasticPool.reserve`, on a GPU of `total_bytes` bytes."""
        self._reserve = reserve
        self._step_bytes = first_step_bytes(total_bytes)
        self._tried_bytes = 0

    def begin(self, held_bytes: int) -> int:
        """Reserve the memory held now plus room for a first step; return the sum in bytes.

        Blocks for at most five seconds while other instances release memory. Raises the same errors
        as `ElasticPool.reserve`.
        """
        self._tried_bytes = held_bytes + self._step_bytes
        self._reserve(self._tried_bytes)
        return self._tried_bytes

    def follow(self, held_bytes: int) -> None:
        """Raise the reserve if a step has held more memory. The reserve never decreases.

        Blocks like `begin` if it rises. If other instances do not release enough, this logs a
        warning and keeps the reserve, because the step has already taken the memory.
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
