"""What a step needs of the machine, and why it is not there.

missing(("gpu", "triton"), simulated=False)     # "" or a reason for people
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.vmm import driver_kinds

NEEDS_GPU = "needs a GPU"


def missing(needs: Iterable[str], *, simulated: bool) -> str:
    """The first need that is not met, as a reason; empty where all are."""
    for need in needs:
        why = (NEEDS_GPU if simulated else _gpu()) if need == "gpu" else _WHY[need]()
        if why:
            return why
    return ""


@functools.cache
def _gpu() -> str:
    why = driver_kinds.cuda().missing
    return f"{NEEDS_GPU}: {why}" if why else ""


def tool(name: str) -> str | None:
    """The path of a program: on PATH, beside this Python, or in a CUDA toolkit."""
    toolkits = sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    folders = [None, str(Path(sys.executable).parent), *map(str, toolkits)]
    return next((path for folder in folders if (path := shutil.which(name, path=folder))), None)


@functools.cache
def torch_for_cuda() -> str:
    """Whether this Python's torch finds the GPU; asked in a process that ends."""
    if importlib.util.find_spec("torch") is None:
        return "needs torch"
    asks = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", asks], check=False, capture_output=True)
    return "" if done.returncode == 0 else "needs a torch that finds the GPU"


def _module(name: str) -> Callable[[], str]:
    return lambda: "" if importlib.util.find_spec(name) else f"needs {name}"


def _kvcached() -> str:
    from benchmarks.gpu.carried import pack

    if pack.has_kvcached() or pack.find_kvcached():
        return ""
    return "needs kvcached, or its source (scripts/gpu --carry)"


def _tool(name: str) -> Callable[[], str]:
    return lambda: "" if tool(name) else f"needs {name}"


def _file(path: str, what: str) -> Callable[[], str]:
    there = Path(__file__).parents[2] / path
    return lambda: "" if there.exists() else f"needs {what}, which this checkout has not"


_WHY: dict[str, Callable[[], str]] = {
    "torch for CUDA": torch_for_cuda,
    "torch": _module("torch"),
    "triton": _module("triton"),
    "transformers": _module("transformers"),
    "vllm": _module("vllm"),
    "kvcached": _kvcached,
    "compute-sanitizer": _tool("compute-sanitizer"),
    "the kernels": _file("benchmarks/gpu/kernels", "the decode kernels"),
    "the integration": _file(
        "kvelastic/integration/transformers/plugin.py", "kvelastic's integration into transformers"
    ),
}
