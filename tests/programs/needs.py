"""What a test needs that a machine may not have, each said once.

    import needs

    @needs.chromium
    def test_the_page(): ...

Each is a mark that skips the test and says why. They are counted once the tests are collected, so
that a run says at its start what it leaves out (conftest.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def find_chromium() -> str | None:
    """The path of a Chromium, by any of its names."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


def find_cuda_include() -> Path | None:
    """A folder with cuda.h: of a toolkit, of the nvidia-cuda-runtime wheel, or as told."""
    told = [Path(place) for place in os.environ.get("KVSIM_CUDA_INCLUDE", "").split(":") if place]
    toolkits = sorted(Path("/usr/local").glob("cuda*/include"))
    packages = {Path(sysconfig.get_paths()["purelib"]), *map(Path, sys.path)}
    wheels = sorted(place for folder in packages for place in folder.glob("nvidia/*/include"))
    places = [*told, *toolkits, *wheels, Path("/usr/include")]
    return next((place for place in places if (place / "cuda.h").is_file()), None)


def find_cuda_python() -> str | None:
    """What to add to PYTHONPATH for cuda.bindings; nothing where it is in this environment."""
    if named := os.environ.get("KVSIM_CUDA_PYTHON"):
        return named
    return "" if _has_module("cuda") and _has_module("cuda.bindings") else None


def find_native_build() -> Path | None:
    """The folder where scripts/setup has built the native module last."""
    builds = Path(__file__).parents[2].glob("build/cp3*/build.ninja")
    newest = max(builds, key=lambda file: file.stat().st_mtime, default=None)
    return newest and newest.parent


def _can_make_hosts() -> bool:
    """Whether this process may make what hosts.py makes: it tries."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    spaces = ("--net", "--mount", "--pid", "--fork", "--mount-proc")
    wire = "mount -t tmpfs tmpfs /dev/shm && ip link add wire0 type veth peer name wire1"
    tried = subprocess.run(["unshare", *spaces, "sh", "-c", wire], capture_output=True)
    return tried.returncode == 0


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _need(is_there: bool, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_there, reason=reason)


_HAS_GPU = shutil.which("nvidia-smi") is not None

gpu = _need(_HAS_GPU, "no NVIDIA driver: no nvidia-smi")
no_gpu = _need(not _HAS_GPU, "there is a GPU")
torch = _need(_has_module("torch"), "no torch: scripts/setup")
amx = _need(
    "amx_tile" in Path("/proc/cpuinfo").read_text(),
    "no AMX: MLA in vLLM's blocks of 32 tokens needs it",
)
TRITON = Path(sys.prefix) / "triton"
"""Where scripts/setup puts Triton: beside the packages, for a torch for the CPU cannot bear it."""
triton = _need((TRITON / "triton").is_dir(), "Triton is not beside vLLM: scripts/setup")
NEWEST_TRANSFORMERS = "5.24"
TRANSFORMERS = {
    series: None if series == "5.19" else Path(sys.prefix) / f"transformers-{series}"
    for series in ("5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23", NEWEST_TRANSFORMERS)
}
"""Series of transformers, and the folder that scripts/setup puts each into; None: the packages'."""
transformers = _need(
    _has_module("torch")
    and _has_module("transformers")
    and all(folder is None or folder.is_dir() for folder in TRANSFORMERS.values()),
    "not all series of transformers are installed: scripts/setup",
)
SGLANG_PYTHON = Path(sys.prefix).with_name(".venv-sglang") / "bin" / "python"
"""Where scripts/setup puts SGLang: in an environment of its own, for it wants other versions."""
sglang = _need(
    SGLANG_PYTHON.parents[1].joinpath("installed").is_file(),
    "SGLang is not in .venv-sglang: scripts/setup",
)
RAY_PYTHON = Path(sys.prefix).with_name(".venv-ray") / "bin" / "python"
"""Where scripts/setup --ray puts Ray: beside the packages of .venv, which it sees."""
ray = _need(
    RAY_PYTHON.parents[1].joinpath("installed").is_file(),
    "Ray is not in .venv-ray: scripts/setup --ray",
)
ray_llm = _need(
    any(RAY_PYTHON.parents[1].glob("lib/*/site-packages/pyarrow")),
    "what Ray Serve LLM needs is not in .venv-ray: scripts/setup --ray",
)
vllm = _need(_has_module("vllm"), "vLLM is not installed: scripts/setup")
playwright = _need(_has_module("playwright"), "no playwright: pip install playwright")
chromium = _need(find_chromium() is not None, "no Chromium: apt-get install chromium")
native_build = _need(find_native_build() is not None, "no build of the module: scripts/setup")
openssl = _need(shutil.which("openssl") is not None, "no openssl: apt-get install openssl")
hosts = _need(
    _can_make_hosts(),
    "only root can make hosts of namespaces, with iproute2 and util-linux, where they are allowed",
)
root = _need(os.geteuid() == 0, "only root can give a file away")
cuda_h = _need(
    find_cuda_include() is not None,
    "no cuda.h: install the nvidia-cuda-runtime wheel or set KVSIM_CUDA_INCLUDE",
)
cuda_python = _need(
    find_cuda_python() is not None,
    "no cuda.bindings: pip install cuda-bindings, or set KVSIM_CUDA_PYTHON",
)
