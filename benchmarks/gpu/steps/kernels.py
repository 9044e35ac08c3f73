"""The programs of benchmarks/gpu/kernels.

Attention by where blocks lie; decode while pages come and go; stale ids behind a row's end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.requirements import tool
from benchmarks.harness import shortened

NEEDS_GPU = 77
"""Their exit code where they cannot do their work; the reason is on stdout."""
QUICK = {"attention": ["--quick"], "decode": ["--tokens", "500"], "stale_columns": []}
SANITIZER = "--error-exitcode 86 --report-api-errors no"


def main() -> None:
    def program(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("program", choices=tuple(QUICK))
        parser.add_argument("--graphs", action="store_true")
        parser.add_argument("--control")
        parser.add_argument("--sanitizer", action="store_true", help="under compute-sanitizer")

    with Findings.of_command(__doc__, program) as found, tempfile.TemporaryDirectory() as folder:
        given = found.arguments
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", f"benchmarks.gpu.kernels.{given.program}"]
        command += ["--json", str(answer)]
        command += ["--graphs"] * given.graphs
        command += ["--control", given.control] if given.control else []
        if given.sanitizer:
            command += ["--under", f"{tool('compute-sanitizer')} {SANITIZER}"]
        command += QUICK[given.program] if found.quick else []
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        print(done.stdout)
        if done.returncode == NEEDS_GPU:
            found.skip(done.stdout.strip())
            return
        told = json.loads(answer.read_text()) if answer.is_file() else {}
        module = importlib.import_module(f"benchmarks.gpu.kernels.{given.program}")
        found.figure("told", shortened(told))
        if told and given.program == "attention":
            _attention(found, module, told)
        elif told and given.program == "decode":
            for line in module.lines(told):
                found.line(line.strip())
        said = [line for line in done.stdout.splitlines() if line.strip()]
        if given.program == "stale_columns":
            for line in said:
                found.line(line)
        found.check("all is as it has to be", done.returncode == 0, " ".join(said[-1:]))


def _attention(found: Findings, module: Any, told: dict[str, Any]) -> None:
    found.table(module.section(told))
    worst: dict[str, float] = {}
    for layout in told["by_layout"]:
        size = re.search(r"(\d+) MiB", layout)
        if size and "paged" in layout:
            worst[size.group(1)] = max(module.ratios(told, layout).values())
    found.figure("attention_over_dense", worst)
    found.figure("ratio_at_default_page", told.get("ratio_at_default_page"))


if __name__ == "__main__":
    main()
