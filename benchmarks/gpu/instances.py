"""Instances on this device in processes of their own, in a ledger that no others join.

with Group() as group, group.instance(pages=64, page_mib=16) as one:
    one.read()
    one.ask("alloc", 8)
"""

from __future__ import annotations

import os
import time

from benchmarks.ledger.instance import Instance
from kvelastic import _vmm
from kvelastic.shared import ledger, segment
from kvelastic.shared.ledger_facts import LedgerInfo


class Group:
    """A context manager: nothing of it is left at its end."""

    def __init__(self, **environ: str) -> None:
        self.name = f"gpu-steps-{os.getpid()}"
        self.environ = {
            "KVELASTIC_DEVICE": "cuda",
            "KVELASTIC_LEDGER": self.name,
            "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
            "KVELASTIC_MAX_CACHED_TOKENS": "-1",
            "KVELASTIC_IDLE_TRIM_SECONDS": "-1",
        } | environ

    def instance(self, pages: int, page_mib: int) -> Instance:
        """It has not read its first line: `read` waits for it."""
        return Instance(pages, page_mib, **self.environ)

    def ledger(self) -> LedgerInfo:
        """As anybody may read it. Raises `LookupError` where it is gone."""
        for info in ledger.list_ledgers():
            if info.group == self.name:
                return info
        raise LookupError(f"there is no ledger of {self.name}")

    def wait_until_counted(self, driver: _vmm.CudaDriver, timeout_s: float) -> bool:
        """Until the ledger knows all that is held of the device besides its members' pages.

        Its members look every so often, and a context that no look has met leaves room to others.
        Blocks, and answers whether it does. Nothing else may change on the device meanwhile.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            taken_bytes = driver.total_bytes - driver.free_bytes
            info = self.ledger()
            if info.others_bytes >= taken_bytes - info.granted_bytes:
                return True
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        ledger.reap()
        segment.reap()
