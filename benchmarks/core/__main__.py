"""`scripts/bench core`: every figure of the core, one table."""

from __future__ import annotations

from benchmarks.core import hot_path, imports, limit, pages
from benchmarks.harness import report

if __name__ == "__main__":
    report(
        "core",
        [*hot_path.figures(), *pages.figures(), *limit.figures(), *imports.figures()],
    )
