"""What an engine's first process can tell of its start, before anything is loaded.

    check_names(["chat"], ending_s=10.0)    # is a live instance called so?
    check_guarantee(settings)               # has the host's memory room for KVELASTIC_MIN?

An instance is made when the engine knows how large its cache is: in another process, after it has
loaded its weights, often a minute later. What would be refused then is refused here. Passing is no
promise: another instance may be faster.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Final

from kvelastic import device, ledger, segment
from kvelastic.config import Config
from kvelastic.engine_cores import has_lost_its_server
from kvelastic.errors import GuaranteeError, SegmentError
from kvelastic.sizes import format_size

_log = logging.getLogger("kvelastic")

_LOOK_S: Final = 0.05


def check_names(names: Iterable[str | None], *, ending_s: float) -> None:
    """Raise `SegmentExistsError` if an instance could not have one of these names.

    None, a name that is made up, is always free. An engine core whose server was killed is about to
    end: this blocks until it has, for `ending_s` seconds at most. Raises as `segment.check_free`.
    """
    for name in names:
        if name is not None:
            _wait_for_orphan(name, ending_s)
            segment.check_free(name)


def _wait_for_orphan(name: str, ending_s: float) -> None:
    end_s = time.monotonic() + ending_s
    is_said = False
    while (pid := _orphan_called(name)) is not None and time.monotonic() < end_s:
        if not is_said:
            _log.info(
                "Waiting for process %d to end: it is called %s, and its server was killed.",
                pid,
                name,
            )
            is_said = True
        time.sleep(_LOOK_S)


def _orphan_called(name: str) -> int | None:
    with suppress(SegmentError):
        info = segment.inspect(name)
        if info.is_alive and has_lost_its_server(info.header["pid"]):
            return int(info.header["pid"])
    return None


def check_guarantee(settings: Config, *, instances: int = 1) -> None:
    """Raise `GuaranteeError` if the host's memory has no room for `KVELASTIC_MIN`.

    For engines on the host: what a GPU is called and how large it is, its workers know. `instances`
    is how many of them start at once, each with that guarantee. Raises as `ledger.join`.
    """
    host = device.host(settings)
    with ExitStack() as places:
        for _ in range(instances):
            try:
                place = ledger.join(
                    host.name,
                    group=settings.ledger,
                    capacity_bytes=host.capacity_bytes,
                    total_bytes=host.total_bytes,
                    name=f"starting_{os.getpid()}",
                    uuid=uuid.uuid4().bytes,
                    min_bytes=settings.minimum,
                    priority=settings.priority,
                )
            except GuaranteeError as error:
                raise GuaranteeError(
                    f"KVELASTIC_MIN={format_size(settings.minimum)}: {error}. Set it lower, give"
                    " another instance a lower guarantee (kvctl set NAME --min SIZE), or raise"
                    " KVELASTIC_HOST_MEMORY."
                ) from error
            places.callback(place.close)
