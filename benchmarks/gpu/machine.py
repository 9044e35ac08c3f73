"""What a run is taken on: the GPU, its driver, the packages that are there."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from typing import Any

from benchmarks import harness
from benchmarks.vmm import driver_kinds

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "nanobind", "cuda-bindings", "numpy")
_ASKED = (
    "name", "driver_version", "uuid", "memory.total", "mig.mode.current", "clocks.max.sm",
    "clocks.max.memory", "power.limit",
)  # fmt: skip


def facts(*, simulated: bool) -> dict[str, Any]:
    """For the results; asks nvidia-smi, and takes nothing of the GPU."""
    kind = driver_kinds.DriverKind(driver_kinds.SIMULATED, "no GPU: the simulated driver")
    if not simulated:
        kind = driver_kinds.cuda()
    told = harness.facts() | {"device": kind.what or kind.missing, "packages": _versions()}
    return told if simulated else told | {"nvidia_smi": _asked()}


def stem(*, simulated: bool, begun: str) -> str:
    """What a run's files are called: when it began, and on which GPU."""
    if simulated:
        return f"{begun}-simulated"
    name = driver_kinds.cuda().what.partition(",")[0] or "no GPU"
    return f"{begun}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"


def _versions() -> dict[str, str]:
    return {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _asked() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    first = done.stdout.splitlines()[:1]
    return dict(zip(_ASKED, first[0].split(", "), strict=False)) if first else {}
