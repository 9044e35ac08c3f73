"""`scripts/bench core`: every figure of the core, one table."""

from __future__ import annotations

import argparse

from benchmarks.core import hot_path, imports, limit, pages
from benchmarks.harness import report


def main() -> None:
    argparse.ArgumentParser("scripts/bench core", description=__doc__).parse_args()
    report(
        "core",
        [*hot_path.figures(), *pages.figures(), *limit.figures(), *imports.figures()],
    )


if __name__ == "__main__":
    main()
