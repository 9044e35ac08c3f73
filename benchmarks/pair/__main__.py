"""`scripts/bench pair`: two engines on one budget beside a lone engine and two halves, on the host.

    scripts/bench pair                    vLLM and transformers, about twenty minutes
    scripts/bench pair --part vllm        one of them
    scripts/bench pair --quick            one round; its figures are no evidence

The programs are the steps `pair` and `colocation` of `scripts/gpu`, which uses them on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import pages
from benchmarks.gpu import findings
from benchmarks.pages import Table

STEPS = {"vllm": "pair", "transformers": "colocation"}
LIMIT_S = 3600.0


class StepError(Exception):
    """A step has failed; the text says why."""


def measure(step: str, quick: bool) -> Table:
    """Run a step in a process of its own; its table, with its checks as notes."""
    with TemporaryDirectory(prefix="kvelastic_bench_pair_") as folder:
        kept = Path(folder) / "findings.json"
        command = [sys.executable, "-m", f"benchmarks.gpu.steps.{step}", "--json", str(kept)]
        subprocess.run([*command, *["--quick"] * quick], check=True, timeout=LIMIT_S)
        told, wrong = findings.read(kept)
    failed = [check for check in told.get("checks", ()) if not check["passed"]]
    if wrong or failed or not told.get("tables"):
        raise StepError(wrong or told.get("skipped") or f"{failed}")
    table = told["tables"][0]
    checks = [": ".join(filter(None, (c["name"], c["said"]))) for c in told["checks"]]
    notes = [*table["notes"], *told["lines"], *(f"held: {check}" for check in checks)]
    return Table(table["headings"], [tuple(row) for row in table["rows"]], notes, told["figures"])


PARTS = {
    "vllm": ("vLLM: seconds to the first token", partial(measure, STEPS["vllm"])),
    "transformers": (
        "transformers: bursts to the first and to the second engine",
        partial(measure, STEPS["transformers"]),
    ),
}


def main() -> int:
    given = pages.arguments("pair", __doc__, PARTS)
    return pages.run("pair", "Two engines on one budget", given, PARTS)


if __name__ == "__main__":
    sys.exit(main())
