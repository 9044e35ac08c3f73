"""What a process pays for kvelastic before it uses it, and a command line as a whole process."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from benchmarks.harness import Figure


def process_ms(*command: str) -> float:
    start = time.perf_counter_ns()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter_ns() - start) / 1e6


def figures() -> list[Figure]:
    python = sys.executable
    kvctl = str(Path(sysconfig.get_path("scripts")) / "kvctl")
    imports = Figure("import kvelastic (whole process less bare Python)", "ms", [], "<= 50 ms")
    listing = Figure("kvctl list --json (whole process)", "ms", [], "<= 400 ms", "python -c pass")
    for _ in range(11):
        bare = process_ms(python, "-c", "pass")
        loaded = process_ms(
            python, "-c", "import kvelastic, sys; assert 'torch' not in sys.modules"
        )
        imports.samples.append(max(loaded - bare, 0.0))
        listing.floor_samples.append(bare)
        listing.samples.append(process_ms(kvctl, "list", "--json"))
    return [imports, listing]
