"""An instance with a disk tier that has records in it, for tests of what operators see and do.

As a program: `tiers_instance.py NAME FOLDER` computes prompts, copies what is cached to the disk,
and prints a line of JSON with how many records there are. It ends, and closes everything, when its
stdin does. As a module, for tests:

    instance = Instance(folder); instance.name; assert instance.end() == 0
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path

from processes import LineProgram
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import segment, tier_status
from kvelastic.shared.segment_listing import SHM_DIR, tier_status_name

DISK_BYTES = 32 << 20


class Instance(LineProgram):
    """Such a process, ready."""

    def __init__(self, folder: Path) -> None:
        unique = f"{os.getpid()}_{random.randrange(1 << 40):x}"
        self.name = f"kvtiers_{unique}"
        super().__init__(
            __file__,
            self.name,
            folder,
            environment={"KVELASTIC_HOST_MEMORY": "256M", "KVELASTIC_LEDGER": f"tiers-{unique}"},
        )
        self.records: int = json.loads(self.read())["records"]
        assert self.records > 20
        self.info = segment.inspect(self.name)
        # Figures are half a second old, and older where the disk is slow to say them.
        wait_until(
            lambda: self._shown_records() == self.records,
            "the status file does not show the records",
        )

    def _shown_records(self) -> int | None:
        status_file = tier_status.read(self.info)
        return None if status_file is None else status_file.tiers[0].records

    @property
    def status_file(self) -> Path:
        return SHM_DIR / tier_status_name(self.info.header["uuid"])

    end = LineProgram.finish


def main() -> None:
    """See the module."""
    from embedded_engine import open_engine

    from kvelastic.tiers.policy import Rules

    name, folder = sys.argv[1:]
    # What an operator erases stays erased: an idle instance would copy it again after five seconds.
    engine = open_engine(
        name,
        random.Random(7),
        disk=Path(folder),
        disk_bytes=DISK_BYTES,
        rules=Rules(idle_after_s=math.inf),
    )
    for _ in range(12):
        engine.begin()
        engine.end()
    assert engine.tiers.clean_all(DEADLINE_S) == 0
    assert engine.tiers.drain(DEADLINE_S)
    (store,) = engine.tiers.stores
    print(json.dumps({"records": store.capacity().records}), flush=True)
    sys.stdin.read()
    while engine.requests:
        engine.end()
    assert engine.tiers.close(DEADLINE_S) == []
    engine.pool.close()


if __name__ == "__main__":
    main()
