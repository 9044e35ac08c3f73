"""`scripts/bench transformers`: transformers with kvelastic against stock transformers.

    scripts/bench transformers                  all parts, about twenty minutes
    scripts/bench transformers --quick          about five minutes; its figures are no evidence
    scripts/bench transformers --part tiny      one part (repeatable)

README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import end_by_exception, facts
from benchmarks.transformers import generate, limit, memory, results, turns
from benchmarks.transformers.engines import NotElasticError, all_ready
from benchmarks.transformers.results import Part, Table
from benchmarks.transformers.workload import SMOLLM2, TINY, Load
from benchmarks.vllm.models import prepare
from kvelastic.errors import KvelasticError

FAILURES = (
    AssertionError,  # of the engines
    NotElasticError,
    KvelasticError,
    OSError,
    subprocess.SubprocessError,
)


def _turns(load: Load, folder: Path, quick: bool) -> Table:
    arguments = []
    if load is SMOLLM2:
        arguments = ["--folder", str(prepare(load.model, folder).folder)]
    if quick:
        load = load.shortened()
    return turns.measure(load, lambda: all_ready(folder, load.num_blocks, arguments))


PARTS: dict[str, tuple[str, Callable[[Path, bool], Table]]] = {
    "smollm2": (
        "1. SmolLM2-135M, 16 prompts at once",
        lambda folder, quick: _turns(SMOLLM2, folder, quick),
    ),
    "tiny": (
        "2. A tiny random model, 16 prompts at once",
        lambda folder, quick: _turns(TINY, folder, quick),
    ),
    "memory": (
        "3. A capacity of 1M tokens beside stock with 16K",
        lambda folder, quick: memory.measure(folder, quick=quick),
    ),
    "limit": (
        "4. A limit lowered on an idle engine",
        lambda folder, quick: limit.measure(folder, quick=quick),
    ),
    "generate": (
        "5. model.generate, SmolLM2-135M",
        lambda folder, quick: generate.measure(prepare("smollm2", folder).folder, quick=quick),
    ),
}


def main() -> int:
    """Measures, prints and keeps; the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench transformers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few turns; kept in build/")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this (repeatable)")
    parser.add_argument("--results", type=Path, help="the folder for JSON and Markdown")
    given = parser.parse_args()
    # A part alone must not replace a whole run's file.
    whole = not given.quick and given.part is None
    kept_in = given.results or (
        results.FOLDER if whole else results.ROOT / "build/bench-transformers"
    )
    told = facts()
    parts, failed = [], {}
    for name in given.part or PARTS:
        title, measure = PARTS[name]
        load, begin_s = os.getloadavg()[0], time.monotonic()
        print(f"  {title}", flush=True)
        with TemporaryDirectory(prefix="kvelastic-bench-transformers-") as folder:
            try:
                table = measure(Path(folder), given.quick)
            except FAILURES as error:
                failed[name] = f"{error or type(error).__name__}"[:5000]
                print(f"FAILED: {name}: {failed[name]}", file=sys.stderr)
                continue
        parts.append(Part(name, title, load, time.monotonic() - begin_s, table))
        print(f"\n{parts[-1].markdown()}\n", flush=True)
    print(f"kept in {results.write(kept_in, told, parts, failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    end_by_exception()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
