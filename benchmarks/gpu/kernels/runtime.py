"""Where the kernels run: compiled on a GPU, or on the processor by Triton's interpreter.

    where = runtime.compiled()          # raises NeedsGpuError
    where = runtime.interpreted()       # any machine; sets TRITON_INTERPRET for this process
    driver = where.open_driver()

To be called before anything imports Triton, which reads that variable then.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from kvelastic import _vmm

NEEDS_GPU: Final = 77
"""Exit status of a command that cannot do its work on this machine."""


class NeedsGpuError(Exception):
    """Why a kernel cannot run here."""


@dataclass(frozen=True)
class Runtime:
    """A device of torch's, and how kernels get there."""

    device: str
    name: str
    """For people: the GPU's name, or what stands in for one."""
    has_triton: bool = True

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Two bytes; Triton's interpreter multiplies no bfloat16."""
        import torch

        return torch.bfloat16 if self.is_gpu or not self.has_triton else torch.float16

    def open_driver(self) -> _vmm.Driver:
        """kvelastic's own driver, told of this thread's stream."""
        from kvelastic import _vmm
        from kvelastic.pool import tensors

        if not self.is_gpu:
            return _vmm.HostDriver()
        driver = _vmm.CudaDriver("cuda")
        tensors.name_streams(driver)
        return driver

    def synchronize(self) -> None:
        """Wait for all kernels; raises what one of them ran into."""
        import torch

        if self.is_gpu:
            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        """What a figure was taken with."""
        import torch

        found = {"device": self.name, "torch": torch.__version__}
        if self.has_triton:
            import triton

            found["triton"] = triton.__version__
        return found


def compiled() -> Runtime:
    """A GPU. Raises `NeedsGpuError` with the reason where there is none that torch can use."""
    import torch

    if not torch.cuda.is_available():
        raise NeedsGpuError(f"torch {torch.__version__} finds no CUDA device")
    if importlib.util.find_spec("triton") is None:
        raise NeedsGpuError("Triton is not installed")
    return Runtime("cuda", torch.cuda.get_device_name())


def interpreted() -> Runtime:
    """The processor. Raises `NeedsGpuError` where Triton is missing, too."""
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is None:
        # scripts/setup puts it beside the packages: a torch for the CPU cannot bear it among them.
        sys.path.append(str(Path(sys.prefix) / "triton"))
    if importlib.util.find_spec("triton") is None:
        raise NeedsGpuError("there is no Triton to interpret its kernels: scripts/setup")
    return Runtime("cpu", "Triton's interpreter")


def eager() -> Runtime:
    """The processor without Triton: attention in torch's own operations."""
    return Runtime("cpu", "torch on the processor", has_triton=False)
