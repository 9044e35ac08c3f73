"""Reads instances: their segments, ledgers and tiers, into `InstanceStatus`.

    for status in look_at_all(): print(status.name, status.word)

The functions map files and block for milliseconds. Any thread may call them. They change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvelastic.errors import LedgerError
from kvelastic.instance.status import InstanceStatus, status_of
from kvelastic.shared import ledger, segment
from kvelastic.shared.ledger_facts import LedgerInfo
from kvelastic.shared.segment_listing import SegmentInfo
from kvelastic.shared.tier_status import tiers_of


def look_at(name: str) -> InstanceStatus:
    """Return one instance's status.

    Raises `SegmentNotFoundError`, and `SegmentFormatError` if the file is not a segment.
    """
    return _read([segment.inspect(name)], ledgers())[0]


def look_at_all(found: Sequence[LedgerInfo] | None = None) -> list[InstanceStatus]:
    """Return the status of every instance that this user may read, sorted by name.

    Dead and unreadable instances are included. `found` are the ledgers to use; default: all
    readable ledgers.
    """
    return _read(segment.list_segments(), ledgers() if found is None else found)


def _read(infos: Sequence[SegmentInfo], found: Sequence[LedgerInfo]) -> list[InstanceStatus]:
    all_shown = tiers_of(infos)
    now_ns = time.monotonic_ns()
    return [
        status_of(info, found, now_ns=now_ns, shown_tiers=all_shown.get(info.name))
        for info in infos
    ]


def ledgers() -> list[LedgerInfo]:
    """Return all ledgers; an empty list if they cannot be read. Instances suffice without them."""
    try:
        return ledger.list_ledgers()
    except (LedgerError, OSError):
        return []
