"""A pool costs what it maps, not what it has room for."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from kvelastic import _vmm
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import native_geometry

def resident_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024

TIB, HUGE = 1 << 40, 2 << 20
layout = PageLayout(block_bytes=64 << 10, buffers=2, blocks_per_page=16, extent_bytes=HUGE)
driver = _vmm.HostDriver()
before = resident_bytes()
pages = TIB // HUGE
memory = _vmm.Range.reserve(driver, native_geometry(layout, pages))
pool = _vmm.Pool(memory, max_blocks=pages * 16, limit_bytes=TIB, capacity_bytes=TIB)
made = resident_bytes() - before
assert pool.available_size() == pages * 16 - 1
ids = pool.alloc(100)
pool.cache(ids[:50])
pool.touch(ids[:20])
pool.free(ids)
pool.check_integrity()
memory.check_integrity()
pool.occupancy()
used = resident_bytes() - before
assert pool.trim() == 6 * HUGE
print(made, used)
"""


def test_tebibyte_address_range_uses_little_memory():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    made, used = map(int, run.stdout.split())
    assert made < 4 << 20, "tables are paid for as they are used"
    assert used < 24 << 20, "7 pages of 2 MiB and little more"
