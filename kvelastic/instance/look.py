"""Looking at instances: their segments, ledgers and tiers, read into `InstanceStatus`.

    for status in look_at_all(): print(status.name, status.word)

Blocks for milliseconds (it maps files). Any thread; a look changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvelastic import ledger, segment
from kvelastic.errors import LedgerError
from kvelastic.instance.status import InstanceStatus, status_of
from kvelastic.ledger_facts import LedgerInfo
from kvelastic.segment_dir import SegmentInfo
from kvelastic.tier_status import tiers_of


def look_at(name: str) -> InstanceStatus:
    """One instance. Raises `SegmentNotFoundError`, or `SegmentFormatError` for another file."""
    return _read([segment.inspect(name)], ledgers())[0]


def look_at_all(found: Sequence[LedgerInfo] | None = None) -> list[InstanceStatus]:
    """Every instance that this user may read, by name; also dead and unreadable ones.

    With their places in the ledgers `found`; without, in all that can be read.
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
    """All ledgers; none where they cannot be read: the instances say enough to go on."""
    try:
        return ledger.list_ledgers()
    except (LedgerError, OSError):
        return []
