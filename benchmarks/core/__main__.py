"""`scripts/bench core [--part NAME]`: the figures of the core, each beside a floor."""

from __future__ import annotations

import sys

from benchmarks.pages import arguments, of_module, run

PARTS = {
    "hot_path": ("1. Calls on the way of every block", of_module("benchmarks.core.hot_path")),
    "pages": ("2. Pages", of_module("benchmarks.core.pages")),
    "limit": ("3. A limit", of_module("benchmarks.core.limit")),
    "imports": ("4. Imports", of_module("benchmarks.core.imports")),
}

if __name__ == "__main__":
    given = arguments("core", __doc__, PARTS, has_quick=False)
    sys.exit(run("core", "Core benchmark", given, PARTS))
