"""`scripts/bench transformers`: transformers with kvelastic against stock transformers.

    scripts/bench transformers                  all parts, about twenty minutes
    scripts/bench transformers --quick          about five minutes; its figures are no evidence
    scripts/bench transformers --part tiny      one part (repeatable)

README.md says what the figures mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.pages import Table, arguments, run
from benchmarks.transformers import generate, limit, memory, turns
from benchmarks.transformers.engines import all_ready
from benchmarks.transformers.workload import SMOLLM2, TINY, Load
from benchmarks.vllm.models import prepare


def _turns(load: Load, folder: Path, quick: bool) -> Table:
    arguments = []
    if load is SMOLLM2:
        arguments = ["--folder", str(prepare(load.model, folder).folder)]
    if quick:
        load = load.shortened()
    return turns.measure(load, lambda: all_ready(folder, load.num_blocks, arguments))


def _in_a_folder(measure: Callable[[Path, bool], Table]) -> Callable[[bool], Table]:
    def measured(quick: bool) -> Table:
        with TemporaryDirectory(prefix="kvelastic-bench-transformers-") as folder:
            return measure(Path(folder), quick)

    return measured


PARTS = {
    "smollm2": (
        "1. SmolLM2-135M, 16 prompts at once",
        _in_a_folder(lambda folder, quick: _turns(SMOLLM2, folder, quick)),
    ),
    "tiny": (
        "2. A tiny random model, 16 prompts at once",
        _in_a_folder(lambda folder, quick: _turns(TINY, folder, quick)),
    ),
    "memory": (
        "3. A capacity of 1M tokens beside stock with 16K",
        _in_a_folder(lambda folder, quick: memory.measure(folder, quick=quick)),
    ),
    "limit": (
        "4. A limit lowered on an idle engine",
        _in_a_folder(lambda folder, quick: limit.measure(folder, quick=quick)),
    ),
    "generate": (
        "5. model.generate, SmolLM2-135M",
        _in_a_folder(
            lambda folder, quick: generate.measure(prepare("smollm2", folder).folder, quick=quick)
        ),
    ),
}
TITLE = "transformers with and without kvelastic"


if __name__ == "__main__":
    sys.exit(run("transformers", TITLE, arguments("transformers", __doc__, PARTS), PARTS))
