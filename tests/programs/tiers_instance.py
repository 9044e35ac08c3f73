"""An instance with a disk tier that has records in it, for tests of what operators see and do.

`tiers_instance.py NAME FOLDER` computes prompts, copies what is cached to the disk, and prints a
line of JSON with how many records there are. It ends, and closes everything, when its stdin does.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from embedded_engine import open_engine

DISK_BYTES = 32 << 20


def main() -> None:
    """See the module."""
    name, folder = sys.argv[1:]
    engine = open_engine(name, random.Random(7), disk=Path(folder), disk_bytes=DISK_BYTES)
    for _ in range(12):
        engine.begin()
        engine.end()
    assert engine.tiers.clean_all(60.0) == 0
    assert engine.tiers.drain(60.0)
    (tier,) = engine.tiers.statistics().tiers
    assert tier.capacity is not None
    print(json.dumps({"records": tier.capacity.records}), flush=True)
    sys.stdin.read()
    while engine.requests:
        engine.end()
    assert engine.tiers.close(60.0) == []
    engine.pool.close()


if __name__ == "__main__":
    main()
