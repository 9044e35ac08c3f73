"""The drivers that are measured: the host's memory, the simulated CUDA, a GPU if there is one."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from benchmarks.vmm.bare_cuda import BareCuda
    from kvelastic import _vmm

HOST: Final = "host"
SIMULATED: Final = "simulated"
CUDA: Final = "cuda"
_SIM_BUILD: Final = Path(__file__).parents[2] / "tests" / "sim" / "build"


@dataclass(frozen=True)
class DriverKind:
    """One driver: how a process reaches it, or why none can."""

    name: str
    what: str
    """For people: the GPU's name, or what stands in for one."""
    environment: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    """Why it cannot be measured here; empty: it can."""

    @property
    def label(self) -> str:
        """How every table and plot names it; a simulation always says that it is one."""
        return "SIMULATED CUDA driver" if self.name == SIMULATED else f"{self.name} ({self.what})"


def host() -> DriverKind:
    return DriverKind(HOST, "memfd in the machine's memory")


def simulated() -> DriverKind:
    """The library of tests/sim, built first where it is not."""
    what = "no GPU: our own libcuda.so.1, which only waits as long as a GPU was reported to take"
    try:
        built = subprocess.run([_SIM_BUILD], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return DriverKind(SIMULATED, what, missing=f"tests/sim/build failed: {error}")
    # Device memory is a sparse file: it costs the machine's memory only where it is written.
    environment = {
        "LD_LIBRARY_PATH": built.stdout.strip(),
        "KVSIM_MEMORY": "14G",
        "KVSIM_CONTEXT_BYTES": "500M",  # as a GPU's
    }
    return DriverKind(SIMULATED, what, environment)


def cuda() -> DriverKind:
    """The GPU that nvidia-smi names first."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return DriverKind(CUDA, "", missing="no NVIDIA GPU here: there is no nvidia-smi")
    query = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    asked = subprocess.run(query, check=False, capture_output=True, text=True)
    if asked.returncode != 0 or not asked.stdout.strip():
        said = (asked.stderr or asked.stdout).strip().splitlines()[:1]
        return DriverKind(CUDA, "", missing=f"nvidia-smi finds no GPU: {' '.join(said)}")
    name, _, version = asked.stdout.splitlines()[0].partition(", ")
    return DriverKind(CUDA, f"{name}, driver {version}")


def all_kinds() -> list[DriverKind]:
    return [host(), simulated(), cuda()]


# In the process that measures:


def open_seam(name: str) -> _vmm.Driver:
    """kvelastic's own driver; no kernel uses its pages unless a part names the stream."""
    from kvelastic import _vmm

    if name == HOST:
        return _vmm.HostDriver()
    driver = _vmm.CudaDriver("cuda")
    driver.use_streams([])
    return driver


def open_bare(name: str) -> _vmm.Driver | BareCuda:
    """The lowest calls that there are: libcuda's; on the host kvelastic's seam is the lowest."""
    if name == HOST:
        return open_seam(name)
    from benchmarks.vmm.bare_cuda import BareCuda

    return BareCuda()
