"""Looking at instances: their segments and ledgers, read into `InstanceStatus`.

    for status in look_at_all(): print(status.name, status.word)

Blocks for milliseconds (it maps files). Any thread; a look changes nothing.
"""

from __future__ import annotations

import time

from kvelastic import ledger, segment
from kvelastic.errors import LedgerError
from kvelastic.instance.status import InstanceStatus, status_of
from kvelastic.ledger_facts import LedgerInfo


def look_at(name: str) -> InstanceStatus:
    """One instance. Raises `SegmentNotFoundError`, or `SegmentFormatError` for another file."""
    info = segment.inspect(name)
    return status_of(info, ledgers(), now_ns=time.monotonic_ns())


def look_at_all() -> list[InstanceStatus]:
    """Every instance that this user may read, by name; also dead and unreadable ones."""
    infos, found = segment.list_segments(), ledgers()
    now_ns = time.monotonic_ns()
    return [status_of(info, found, now_ns=now_ns) for info in infos]


def ledgers() -> list[LedgerInfo]:
    """All ledgers; none where they cannot be read: the instances say enough to go on."""
    try:
        return ledger.list_ledgers()
    except (LedgerError, OSError):
        return []
