"""Checks that an engine's first process makes before it loads anything.

    check_names(["chat"], ending_s=10.0)    # does a live instance have this name?
    check_guarantee(settings)               # does host memory have room for KVELASTIC_MIN?

The engine creates its instance once it knows the size of its cache: in another process, after
loading weights, often a minute later. These checks fail earlier for the same reasons. The instance
may still be refused later, because another instance may start first.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Final

from kvelastic.config import Config
from kvelastic.device import selection
from kvelastic.errors import GuaranteeError, SegmentError
from kvelastic.shared import ledger, segment
from kvelastic.shared.engine_cores import has_lost_its_server
from kvelastic.units import format_size

_log = logging.getLogger("kvelastic")

_LOOK_S: Final = 0.05


def check_names(names: Iterable[str | None], *, ending_s: float) -> None:
    """Raise `SegmentExistsError` if an instance could not use one of `names`.

    None, an automatic name, is always free. If an engine core whose server was killed has a name,
    this blocks until the core ends, for at most `ending_s` seconds. Raises the same errors as
    `segment.check_free`.
    """
    for name in names:
        if name is not None:
            _wait_for_orphan(name, ending_s)
            segment.check_free(name)


def _wait_for_orphan(name: str, ending_s: float) -> None:
    end_s = time.monotonic() + ending_s
    is_logged = False
    while (pid := _orphan_called(name)) is not None and time.monotonic() < end_s:
        if not is_logged:
            _log.info(
                "Waiting for process %d to end: it is called %s, and its server was killed.",
                pid,
                name,
            )
            is_logged = True
        time.sleep(_LOOK_S)


def _orphan_called(name: str) -> int | None:
    with suppress(SegmentError):
        info = segment.inspect(name)
        if info.is_alive and has_lost_its_server(info.header["pid"]):
            return int(info.header["pid"])
    return None


def check_guarantee(settings: Config, *, instances: int = 1) -> None:
    """Raise `GuaranteeError` if host memory has no room for `KVELASTIC_MIN`.

    For engines on the host only; names and sizes of GPUs are known in the workers. `instances` is
    the number of instances that start at once, each with this guarantee. Raises the same errors as
    `ledger.join`.
    """
    host = selection.host(settings)
    with ExitStack() as memberships:
        for _ in range(instances):
            try:
                joined = ledger.join(
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
                    f"KVELASTIC_MIN={format_size(settings.minimum)}: {error}, or raise"
                    " KVELASTIC_HOST_MEMORY."
                ) from error
            memberships.callback(joined.close)
