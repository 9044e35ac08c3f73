"""An NVML of our own, as strict as the real one: GPUs that are told, refusals on demand.

    fake = FakeNvml([FakeGpu(), FakeGpu(refusals={"memory": Status.NOT_SUPPORTED})])
    list_gpus(fake, name_of)
    assert fake.starts == fake.stops

It is a `kvelastic.device.nvml.Nvml`. `cuda_module(fake)` and `pynvml_module(fake)` are the same
behind the functions and errors of the two packages, as modules. As a program, `fake_nvml.py FOLDER`
writes a `pynvml` and a `cuda` without nvml into FOLDER: with it first in PYTHONPATH a process sees
MACHINE.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

from kvelastic.device.nvml import NOT_AVAILABLE_BYTES, Nvml, ProcessKind, Status, nvml_error
from kvelastic.errors import NvmlError

GIB = 1 << 30
QUESTIONS = ("device", "name", "uuid", "memory", "processes", "is_mig_on", "mig_slots")


@dataclass
class FakeGpu:
    """A GPU or a MIG instance, and what it refuses."""

    name: str = "NVIDIA Fake 80GB"
    uuid: str = "GPU-11111111-1111-1111-1111-111111111111"
    total_bytes: int = 80 * GIB
    free_bytes: int = 60 * GIB
    processes: dict[ProcessKind, list[tuple[int, int | None]]] = field(default_factory=dict)
    slots: list[FakeGpu | None] | None = None
    """MIG instances by slot; None: MIG is off."""
    refusals: dict[str, Status] = field(default_factory=dict)
    """By question: one of QUESTIONS, `mig_device:SLOT`, or `processes:KIND`; `*` is all but the
    handle itself."""


@dataclass(frozen=True)
class _Handle:
    gpu: FakeGpu
    session: int


class FakeNvml(Nvml):
    """NVML with these GPUs; `start`, `version`, `count` and `stop` can be refused too."""

    def __init__(self, gpus: list[FakeGpu], refusals: dict[str, Status] | None = None) -> None:
        self.gpus = gpus
        self.refusals = refusals or {}
        self.starts = self.stops = 0

    def _check(self, question: str) -> None:
        if question in self.refusals:
            raise nvml_error(self.refusals[question])
        if question != "start" and self.starts == self.stops:
            raise nvml_error(Status.UNINITIALIZED)

    def _of(self, handle: object, *questions: str) -> FakeGpu:
        self._check("any question")
        if not isinstance(handle, _Handle) or handle.session != self.starts:
            raise nvml_error(Status.INVALID_ARGUMENT)
        for question in (*questions, "*"):
            if question in handle.gpu.refusals:
                raise nvml_error(handle.gpu.refusals[question])
        return handle.gpu

    def start(self) -> None:
        self._check("start")
        self.starts += 1

    def stop(self) -> None:
        # Counted even if refused: what matters is that it was tried, once.
        if self.starts == self.stops:
            raise nvml_error(Status.UNINITIALIZED)
        self.stops += 1
        if "stop" in self.refusals:
            raise nvml_error(self.refusals["stop"])

    def driver_version(self) -> str:
        self._check("version")
        return "580.65.06"

    def count(self) -> int:
        self._check("count")
        return len(self.gpus)

    def device(self, index: int) -> object:
        self._check("any question")
        if not 0 <= index < len(self.gpus):
            raise nvml_error(Status.INVALID_ARGUMENT)
        if "device" in self.gpus[index].refusals:
            raise nvml_error(self.gpus[index].refusals["device"])
        return _Handle(self.gpus[index], self.starts)

    def name(self, device: object) -> str:
        return self._of(device, "name").name

    def uuid(self, device: object) -> str:
        return self._of(device, "uuid").uuid

    def memory(self, device: object) -> tuple[int, int]:
        gpu = self._of(device, "memory")
        return gpu.total_bytes, gpu.free_bytes

    def processes(self, device: object, kind: ProcessKind) -> list[tuple[int, int | None]]:
        return self._of(device, "processes", f"processes:{kind}").processes.get(kind, [])

    def is_mig_on(self, device: object) -> bool:
        return self._of(device, "is_mig_on").slots is not None

    def mig_slots(self, device: object) -> int:
        return len(self._of(device, "mig_slots").slots or ())

    def mig_device(self, device: object, slot: int) -> object:
        slots = self._of(device, f"mig_device:{slot}").slots or ()
        instance = slots[slot] if 0 <= slot < len(slots) else None
        if instance is None:
            raise nvml_error(Status.NOT_FOUND)
        return _Handle(instance, self.starts)


class PynvmlError(Exception):
    """As `pynvml.NVMLError`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"value {value}")
        self.value = value


def pynvml_module(fake: FakeNvml) -> ModuleType:
    """The fake as `pynvml`, of a release that answers in bytes."""

    def memory(device: object) -> SimpleNamespace:
        total, free = fake.memory(device)
        return SimpleNamespace(total=total, free=free, used=total - free)

    def processes(kind: ProcessKind) -> Callable[[object], list[SimpleNamespace]]:
        return lambda device: [
            SimpleNamespace(pid=pid, usedGpuMemory=None if used == NOT_AVAILABLE_BYTES else used)
            for pid, used in fake.processes(device, kind)
        ]

    functions: dict[str, Callable[..., object]] = {
        "nvmlInit": fake.start,
        "nvmlShutdown": fake.stop,
        "nvmlSystemGetDriverVersion": lambda: fake.driver_version().encode(),
        "nvmlDeviceGetCount": fake.count,
        "nvmlDeviceGetHandleByIndex": fake.device,
        "nvmlDeviceGetName": lambda device: fake.name(device).encode(),
        "nvmlDeviceGetUUID": lambda device: fake.uuid(device).encode(),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses_v3": processes("compute"),
        "nvmlDeviceGetGraphicsRunningProcesses_v3": processes("graphics"),
        "nvmlDeviceGetMPSComputeRunningProcesses_v3": processes("mps"),
        "nvmlDeviceGetMigMode": lambda device: [int(fake.is_mig_on(device)), 0],
        "nvmlDeviceGetMaxMigDeviceCount": fake.mig_slots,
        "nvmlDeviceGetMigDeviceHandleByIndex": fake.mig_device,
    }
    module = ModuleType("pynvml")
    for name, function in functions.items():
        setattr(module, name, _raising(function))
    vars(module).update(NVMLError=PynvmlError)
    return module


def _raising(function: Callable[..., object]) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        try:
            return function(*arguments)
        except NvmlError as error:
            raise PynvmlError(error.status) from None

    return call


def mig_machine() -> FakeNvml:
    """A whole GPU, one in two MIG instances, one that shares the host's memory, and a lost one."""
    return FakeNvml(
        [
            FakeGpu(processes={"compute": [(4_000_001, 5 * GIB), (4_000_002, None)]}),
            FakeGpu(
                uuid="GPU-22222222-2222-2222-2222-222222222222",
                slots=[
                    None,
                    FakeGpu("NVIDIA Fake MIG 3g.40gb", "MIG-aaaaaaaa", 40 * GIB, 39 * GIB),
                    None,
                    FakeGpu("NVIDIA Fake MIG 1g.10gb", "MIG-bbbbbbbb", 10 * GIB, 10 * GIB),
                ],
                refusals={"memory": Status.NO_PERMISSION},
            ),
            FakeGpu(
                name="NVIDIA \x1b[31mGB10[bold]",
                uuid="GPU-33333333-3333-3333-3333-333333333333",
                refusals={"memory": Status.NOT_SUPPORTED},
            ),
            FakeGpu(refusals={"device": Status.GPU_IS_LOST}),
        ]
    )


def write_packages(folder: Path) -> None:
    """Make `import pynvml` mean `mig_machine()` for a process with `folder` in its PYTHONPATH."""
    bindings = folder / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    (bindings.parent / "__init__.py").touch()
    (bindings / "__init__.py").touch()  # and no nvml in it, as in cuda-python 12.6
    (folder / "pynvml.py").write_text(
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "import fake_nvml\n"
        "globals().update(vars(fake_nvml.pynvml_module(fake_nvml.mig_machine())))\n"
    )


if __name__ == "__main__":
    write_packages(Path(sys.argv[1]))
