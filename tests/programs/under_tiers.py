"""An engine with a disk tier under test: its variables, its status file, limits that change.

with changing_limits(name, page_bytes, at_last_bytes=kv_bytes):
    answers = server.ask_all()
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asking_threads import beside

from kvelastic.shared import segment, tier_status
from kvelastic.shared.tier_status import TiersStatus


def disk_tier(folder: Path, size: str = "256M") -> dict[str, str]:
    """Variables of an engine over a disk tier that keeps all it is given, however slow it is."""
    return {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_TIERS": f"disk:{folder}:{size}",
        "KVELASTIC_TIER_LIMIT_SECONDS": "60",  # a busy machine drops nothing
        "KVELASTIC_TIER_COMPARE": "false",  # nor finds that such a model computes faster
    }


def status_file_of(name: str) -> TiersStatus:
    """What an instance's tiers say of themselves, half a second old at most."""
    status_file = tier_status.read(segment.inspect(name))
    assert status_file is not None
    return status_file


@contextmanager
def changing_limits(name: str, page_bytes: int, at_last_bytes: int) -> Iterator[None]:
    """In the body the instance has another limit every 50 ms, of 1 to 30 pages."""

    def change(is_over: threading.Event) -> None:
        pages = 1
        while not is_over.is_set():
            pages = pages * 3 % 31 or 1
            segment.request(name, limit_bytes=pages * page_bytes)
            is_over.wait(0.05)

    try:
        with beside(change):
            yield
    finally:
        segment.request(name, limit_bytes=at_last_bytes, wait_s=90)
