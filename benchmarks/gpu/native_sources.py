"""What the native module is made from, as one number: it is built again when that changes."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def digest() -> str:
    """Of the sources, of what CMake reads, of this Python, and of what the tree has links to."""
    told = hashlib.sha256(sys.version.encode())
    for name in sorted(path.name for path in (ROOT / "kvelastic").iterdir()):
        told.update(name.encode() + b"\0" if name != "__pycache__" else b"")
    sources = sorted((ROOT / "vmm_csrc").rglob("*.*"))
    for path in [ROOT / "CMakeLists.txt", *sources]:
        told.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return told.hexdigest()
