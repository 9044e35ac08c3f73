"""The other end of `gpu_child`: start it, read what it says, and bear that it dies or hangs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvelastic.doctor.child import run_child
from kvelastic.doctor.facts import Gpu, GpuFacts

PATIENCE_S: Final = 20.0
"""A first contact with eight GPUs takes some seconds where no daemon keeps the driver awake."""

# Not -m: it would look for kvelastic in the working directory first, where anything may lie.
_CHILD: Final = (
    sys.executable,
    "-c",
    "import sys; sys.path[:] = [p for p in sys.path if p];"
    " from kvelastic.doctor.gpu_child import main; main()",
)


def ask_gpus(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    *,
    command: Sequence[str] = _CHILD,
    timeout_s: float = PATIENCE_S,
) -> GpuFacts:
    """What a child finds of NVIDIA's driver and the GPUs; at most `timeout_s` long. Never raises.

    `root` is where `proc` and `dev` are found.
    """
    facts = GpuFacts(
        kernel_module=_kernel_module(root),
        has_device_files=any((root / "dev").glob("nvidia[0-9]*")) or (root / "dev/dxg").exists(),
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
    )
    lines, end = run_child(command, environ, timeout_s)
    for line in lines:
        facts = _with(facts, line)
    return replace(facts, child_end=end or facts.child_end)


def _with(facts: GpuFacts, line: str) -> GpuFacts:
    """The facts with one more line; anything else (a library's chatter) is passed over."""
    try:
        said: dict[str, Any] = json.loads(line)
        if "gpu" in said:
            return replace(facts, gpus=(*facts.gpus, Gpu(**said["gpu"])))
        return replace(facts, **said)
    except (ValueError, TypeError):
        return facts


def _kernel_module(root: Path) -> str:
    """The version in `NVRM version: NVIDIA ... Kernel Module  580.82.07  Release Build ...`."""
    try:
        first = (root / "proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""
    numbers = [word for word in first.split() if word[0].isdigit() and "." in word]
    return numbers[0] if numbers else "of an unknown version"
