"""Triton's interpreter as vLLM's Triton: call it before vLLM is imported.

interpret_triton(needs.TRITON)      # a folder with triton in it
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace


def interpret_triton(folder: str | Path) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(str(folder))
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
