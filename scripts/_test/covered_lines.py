"""Measures the lines of the product that a run covers, in all its Python processes.

with measured(workspace.folder): ...      # every process that starts in the body is measured
print_report(workspace.folder)            # also writes build/coverage.json

SGLang's environment is not measured, nor is a process that ends by SIGKILL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRODUCT = ("kvelastic", "cli", "controller")
REPORT = Path("build/coverage.json")


@contextmanager
def measured(folder: Path) -> Iterator[None]:
    source = ",".join(str(Path(name).resolve()) for name in PRODUCT)
    warnings = "no-data-collected,module-not-measured,module-not-imported,already-imported"
    _settings(folder).write_text(
        f"[run]\nsource = {source}\nparallel = true\ndata_file = {folder / 'covered'}\n"
        f"patch = subprocess\ndisable_warnings = {warnings}\n"
    )
    # coverage's .pth file starts the measurement in each Python process that has this variable.
    os.environ["COVERAGE_PROCESS_START"] = str(_settings(folder))
    try:
        yield
    finally:
        del os.environ["COVERAGE_PROCESS_START"]


def print_report(folder: Path) -> None:
    def coverage(*arguments: str) -> None:
        settings = f"--rcfile={_settings(folder)}"
        subprocess.run([sys.executable, "-m", "coverage", *arguments, settings], check=True)

    coverage("combine", "--quiet")
    coverage("json", "--quiet", "-o", str(REPORT))
    coverage("report", "--sort=cover", "--skip-covered")


def _settings(folder: Path) -> Path:
    return folder / "coverage.ini"
