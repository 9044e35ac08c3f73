"""`kvctl list` as a whole process, with twenty real instances to list."""

from __future__ import annotations

import os
import sys
import sysconfig
from contextlib import ExitStack
from pathlib import Path

from benchmarks.core.imports import process_ms
from benchmarks.harness import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "programs"))
from ledger_instance import Instance

INSTANCES = 20


def figures(rounds: int) -> list[Figure]:
    kvctl = str(Path(sysconfig.get_path("scripts")) / "kvctl")
    figure = Figure(
        f"kvctl list, {INSTANCES} instances (whole process)", "ms", [], "<= 150 ms",
        "python -c 'import click'",
    )  # fmt: skip
    device = {
        "KVELASTIC_HOST_MEMORY": "1G",
        "KVELASTIC_LEDGER": f"bench-listing-{os.getpid()}",
        "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
    }
    with ExitStack() as stack:
        for _ in range(INSTANCES):
            stack.enter_context(Instance(**device))
        for _ in range(rounds):
            figure.floor_samples.append(process_ms(sys.executable, "-c", "import click"))
            figure.samples.append(process_ms(kvctl, "list"))
    return [figure]
