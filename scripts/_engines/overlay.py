"""Puts an engine's newest release into a folder of its own, beside what is installed.

    release = install("vllm", Path("build/engines"), end_s)     # a Release

The folder goes first on PYTHONPATH of the environment that has the tested release: torch and other
large dependencies are shared. Dependencies that are new in a release go into the folder, too. vLLM
has wheels for CUDA only; its Python code then runs over the kernels of the installed CPU build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOR_GPUS = frozenset(
    {
        "apache-tvm-ffi",
        "cuda-python",
        "fastsafetensors",
        "flashinfer-cubin",
        "flashinfer-python",
        "humming-kernels",
        "instanttensor",
        "nvtx",
        "pynvvideocodec",
        "quack-kernels",
        "tilelang",
        "tokenspeed-mla",
        "torch",
        "torchaudio",
        "torchcodec",
        "torchvision",
        "triton",
    }
)
"""Dependencies that an engine on a CPU does without, or that must stay as installed."""


class NotReachedError(Exception):
    """A step did not end within the time, or the package index failed; says which."""


@dataclass(frozen=True)
class Release:
    """A release of an engine, and where it runs. `overlay` is None if it is installed."""

    engine: str
    version: str
    python: Path
    overlay: Path | None = None
    kernels: str = ""
    """Version of the CPU build whose kernels it runs on, if that is another."""

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.overlay is None else {"PYTHONPATH": str(self.overlay)}


def python_of(engine: str) -> Path:
    """Return the interpreter of the environment with the tested release."""
    return ROOT / (".venv-sglang" if engine == "sglang" else ".venv") / "bin" / "python"


def packages_of(engine: str) -> Path | None:
    """Return the folder of packages with the tested release, or None if it is not installed."""
    here = Path(sysconfig.get_paths()["purelib"])
    folders = [here, *sorted(ROOT.glob(".venv-sglang/lib/python*/site-packages"))]
    return next((each for each in folders if (each / engine).is_dir()), None)


def run(command: list[str], end_s: float, what: str) -> str:
    """Run a command until `end_s` (`time.monotonic`); return its output."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise NotReachedError(f"no time left for: {what}")
    try:
        done = subprocess.run(command, timeout=left_s, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        raise NotReachedError(f"the time ended during: {what}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NotReachedError(f"{what} failed: {said[-1] if said else done.returncode}")
    return done.stdout


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def newest_version(engine: str, end_s: float) -> str:
    """Return the newest release on the package index. Raises `NotReachedError`."""
    output = run(_pip("index", "versions", engine), end_s, f"look for the newest {engine}")
    found = re.search(r"^\S+ \(([^)]+)\)", output, re.MULTILINE)
    if found is None:
        raise NotReachedError(f"pip named no release of {engine}")
    return found[1]


def fetch(engine: str, version: str, folder: Path, end_s: float) -> Path:
    """Download the wheel of a release into the folder; return its path."""
    arguments = ("download", "--no-deps", "--only-binary=:all:", "--dest", str(folder))
    run(_pip(*arguments, f"{engine}=={version}"), end_s, f"download {engine} {version}")
    return next(folder.glob(f"{engine}-*.whl"))


def install(engine: str, folder: Path, end_s: float) -> Release:
    """Make the newest release runnable below `folder`. Raises `NotReachedError`.

    Keeps what an earlier call has made.
    """
    packages = packages_of(engine)
    if packages is None:
        raise NotReachedError(f"{engine} is not installed here; run scripts/setup")
    version = newest_version(engine, end_s)
    ours = _distributions(packages)[engine]
    if ours.version.partition("+")[0] == version:
        return Release(engine, version, python_of(engine))
    overlay = folder / f"{engine}-{version}"
    kernels = ours.version.partition("+")[0] if engine == "vllm" else ""
    done = overlay / "complete"
    if not done.is_file():
        shutil.rmtree(overlay, ignore_errors=True)
        overlay.mkdir(parents=True)
        wheel = fetch(engine, version, overlay, end_s)
        _unpack(wheel, overlay, packages if kernels else None)
        wheel.unlink()
        if kernels:
            _rename(overlay, engine, f"{version}+cpu")
        missing = [str(each) for each in _missing(overlay, packages, engine)]
        if missing:
            target = ("--no-deps", "--no-compile", "--target", str(overlay))
            run(_pip("install", *target, *missing), end_s, f"install {', '.join(missing)}")
        done.touch()
    return Release(engine, version, python_of(engine), overlay, kernels)


def _distributions(packages: Path) -> dict[str, Distribution]:
    found = distributions(path=[str(packages)])
    return {canonicalize_name(each.name): each for each in found}


def _unpack(wheel: Path, overlay: Path, kernels: Path | None) -> None:
    """Extract a wheel; with `kernels`, native modules are those of that folder instead."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if kernels is None or ".so" not in Path(name).suffixes:
                archive.extract(name, overlay)
    if kernels is not None:
        for module in kernels.glob("vllm/*.so"):
            (overlay / "vllm" / module.name).symlink_to(module)


def _rename(overlay: Path, engine: str, version: str) -> None:
    """Give the release the version by which vLLM knows a build for CPUs."""
    (info,) = overlay.glob(f"{engine}-*.dist-info")
    text = (info / "METADATA").read_text(errors="replace")
    text = re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1)
    (info / "METADATA").write_text(text)
    info.rename(overlay / f"{engine}-{version}.dist-info")


def _missing(overlay: Path, packages: Path, engine: str) -> Iterator[Requirement]:
    """Yield the requirements of the release that the environment does not have."""
    have = _distributions(packages)
    for text in _distributions(overlay)[engine].requires or ():
        needed = Requirement(text)
        name = canonicalize_name(needed.name)
        if name in FOR_GPUS or name.startswith(("nvidia-", "sglang-", "sgl-")):
            continue
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        if name not in have or not needed.specifier.contains(have[name].version, prereleases=True):
            yield Requirement(f"{needed.name}{needed.specifier}")
