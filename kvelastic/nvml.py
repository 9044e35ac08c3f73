"""NVML, NVIDIA's management library, as far as kvelastic needs it: facts without a CUDA context.

nvml = find()                   # None: no Python package for it is installed
nvml.start()                    # every start needs its stop
try:
    total_bytes, free_bytes = nvml.memory(nvml.device(0))
finally:
    nvml.stop()

Two packages reach it, and they name and fail differently: `cuda.bindings.nvml` (cuda-python since
12.9.6 and 13.2, with numpy) and `pynvml` (nvidia-ml-py). Behind `Nvml` they are the same, and every
failure is an `NvmlError` that says in words what to do.
"""

from __future__ import annotations

import importlib
from enum import IntEnum
from typing import Any, Final, Literal, Protocol

from kvelastic.errors import DriverError

INSTALL: Final = "pip install 'kvelastic[cuda]'"

ProcessKind = Literal["compute", "graphics", "mps"]
PROCESS_KINDS: Final[tuple[ProcessKind, ...]] = ("compute", "graphics", "mps")

NOT_AVAILABLE_BYTES: Final = 2**64 - 1
"""What NVML writes where it does not know the memory of a process."""

_MIG_ENABLED: Final = 1


class Status(IntEnum):
    """NVML's own numbers of the failures that are met here."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    UNKNOWN = 999


_WORDS: Final[dict[int, str]] = {
    Status.NOT_SUPPORTED: "NVML cannot tell for this GPU",
    Status.NO_PERMISSION: (
        "this user may not ask; run it as root, or as a user who may read /dev/nvidia*"
    ),
    Status.DRIVER_NOT_LOADED: (
        "the NVIDIA driver's kernel module is not loaded; run `modprobe nvidia`, or install the"
        " driver"
    ),
    Status.LIBRARY_NOT_FOUND: (
        "libnvidia-ml.so.1 was not found; install the NVIDIA driver, or give the container its"
        " GPUs (docker run --gpus all)"
    ),
    Status.FUNCTION_NOT_FOUND: "the NVIDIA driver is too old to tell; update it",
    Status.GPU_IS_LOST: (
        "the GPU is lost: it no longer answers the driver; look for Xid in `dmesg`, then reset it"
        " or restart the machine"
    ),
    Status.RESET_REQUIRED: "the GPU needs a reset; run `nvidia-smi --gpu-reset -i N` as root",
    Status.LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver's library and its kernel module are of different versions, as after an"
        " update; restart the machine (or the container)"
    ),
    Status.UNKNOWN: "NVML failed and does not know why; `nvidia-smi` and `dmesg` may say more",
}


class NvmlError(DriverError):
    """NVML refused a question; the message says what to do next."""

    def __init__(self, status: int, detail: str = "") -> None:
        words = _WORDS.get(status) or f"NVML answered with error {_name_of(status)}"
        super().__init__(f"{words} ({detail})" if detail else words)
        self.status = status
        """NVML's number; one of `Status`, if it is known here."""


def _name_of(status: int) -> str:
    try:
        return f"{status} ({Status(status).name})"
    except ValueError:
        return str(status)


class Nvml(Protocol):
    """What kvelastic asks of NVML. Every call may raise `NvmlError`.

    A device is an opaque handle, good until `stop`; a MIG instance is a device too.
    """

    def start(self) -> None:
        """Open NVML; if it does not raise, `stop` must follow."""

    def stop(self) -> None:
        """Close it."""

    def driver_version(self) -> str:
        """Version of the NVIDIA driver, such as `580.65.06`."""

    def count(self) -> int:
        """How many GPUs there are, those that do not answer included."""

    def device(self, index: int) -> object:
        """The GPU of that index, in NVML's order (the bus's), which need not be CUDA's."""

    def name(self, device: object) -> str:
        """What the product is called."""

    def uuid(self, device: object) -> str:
        """`GPU-...`, or `MIG-...` of an instance."""

    def memory(self, device: object) -> tuple[int, int]:
        """Total and free bytes."""

    def processes(self, device: object, kind: ProcessKind) -> list[tuple[int, int | None]]:
        """Pid and bytes of each process of that kind; None or `NOT_AVAILABLE_BYTES`: not known."""

    def is_mig_on(self, device: object) -> bool:
        """Whether the GPU is split into MIG instances."""

    def mig_slots(self, device: object) -> int:
        """How many MIG instances it could have."""

    def mig_device(self, device: object, slot: int) -> object:
        """The MIG instance in that slot; `NOT_FOUND` for an empty one."""


class _Adapter:
    """A package that reaches NVML, with its errors made into `NvmlError`."""

    def __init__(self, library: Any, error_class: type[Exception], status_field: str) -> None:
        self._library = library
        self._error_class = error_class
        self._status_field = status_field

    def _ask(self, function: str, *arguments: object) -> Any:
        try:
            return getattr(self._library, function)(*arguments)
        except self._error_class as error:
            raise NvmlError(int(getattr(error, self._status_field))) from error
        except (AttributeError, RuntimeError) as error:  # the package, or the driver, lacks it
            raise NvmlError(Status.FUNCTION_NOT_FOUND, str(error)) from error
        except Exception as error:  # one odd answer must not hide the rest of the machine
            raise NvmlError(Status.UNKNOWN, repr(error)) from error

    def _ask_twice(self, function: str, *arguments: object) -> Any:
        """Both packages ask for a count and then for that many: one more may start in between."""
        try:
            return self._ask(function, *arguments)
        except NvmlError as error:
            if error.status != Status.INSUFFICIENT_SIZE:
                raise
            return self._ask(function, *arguments)


class CudaBindingsNvml(_Adapter):
    """NVML by way of `cuda.bindings.nvml`."""

    def __init__(self, library: Any) -> None:
        super().__init__(library, library.NvmlError, "status")

    def start(self) -> None:
        """Open NVML."""
        try:
            self._ask("init_v2")
        except NvmlError as error:
            if isinstance(error.__cause__, RuntimeError):  # this call is what loads the library
                raise NvmlError(Status.LIBRARY_NOT_FOUND) from error
            raise

    def stop(self) -> None:
        """Close it."""
        self._ask("shutdown")

    def driver_version(self) -> str:
        """Version of the driver."""
        return str(self._ask("system_get_driver_version"))

    def count(self) -> int:
        """How many GPUs there are."""
        return int(self._ask("device_get_count_v2"))

    def device(self, index: int) -> object:
        """The GPU of that index."""
        return self._ask("device_get_handle_by_index_v2", index)

    def name(self, device: object) -> str:
        """What the product is called."""
        return str(self._ask("device_get_name", device))

    def uuid(self, device: object) -> str:
        """Its UUID."""
        return str(self._ask("device_get_uuid", device))

    def memory(self, device: object) -> tuple[int, int]:
        """Total and free bytes."""
        memory = self._ask("device_get_memory_info_v2", device)
        return int(memory.total), int(memory.free)

    def processes(self, device: object, kind: ProcessKind) -> list[tuple[int, int | None]]:
        """Pid and bytes of each process."""
        which = "mps_compute" if kind == "mps" else kind
        found = self._ask_twice(f"device_get_{which}_running_processes_v3", device)
        return [(int(found[i].pid), int(found[i].used_gpu_memory)) for i in range(len(found))]

    def is_mig_on(self, device: object) -> bool:
        """Whether the GPU is split."""
        return int(self._ask("device_get_mig_mode", device)[0]) == _MIG_ENABLED

    def mig_slots(self, device: object) -> int:
        """How many MIG instances it could have."""
        return int(self._ask("device_get_max_mig_device_count", device))

    def mig_device(self, device: object, slot: int) -> object:
        """The MIG instance in that slot."""
        return self._ask("device_get_mig_device_handle_by_index", device, slot)


class PynvmlNvml(_Adapter):
    """NVML by way of `pynvml`, the module of nvidia-ml-py."""

    def __init__(self, library: Any) -> None:
        super().__init__(library, library.NVMLError, "value")

    def start(self) -> None:
        """Open NVML."""
        self._ask("nvmlInit")

    def stop(self) -> None:
        """Close it."""
        self._ask("nvmlShutdown")

    def driver_version(self) -> str:
        """Version of the driver."""
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def count(self) -> int:
        """How many GPUs there are."""
        return int(self._ask("nvmlDeviceGetCount"))

    def device(self, index: int) -> object:
        """The GPU of that index."""
        return self._ask("nvmlDeviceGetHandleByIndex", index)

    def name(self, device: object) -> str:
        """What the product is called."""
        return _text(self._ask("nvmlDeviceGetName", device))

    def uuid(self, device: object) -> str:
        """Its UUID."""
        return _text(self._ask("nvmlDeviceGetUUID", device))

    def memory(self, device: object) -> tuple[int, int]:
        """Total and free bytes."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", device)
        return int(memory.total), int(memory.free)

    def processes(self, device: object, kind: ProcessKind) -> list[tuple[int, int | None]]:
        """Pid and bytes of each process."""
        which = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}[kind]
        # By its version: the name without one is refused where package and driver differ in age.
        found = self._ask_twice(f"nvmlDeviceGet{which}RunningProcesses_v3", device)
        return [(int(process.pid), process.usedGpuMemory) for process in found]

    def is_mig_on(self, device: object) -> bool:
        """Whether the GPU is split."""
        return int(self._ask("nvmlDeviceGetMigMode", device)[0]) == _MIG_ENABLED

    def mig_slots(self, device: object) -> int:
        """How many MIG instances it could have."""
        return int(self._ask("nvmlDeviceGetMaxMigDeviceCount", device))

    def mig_device(self, device: object, slot: int) -> object:
        """The MIG instance in that slot."""
        return self._ask("nvmlDeviceGetMigDeviceHandleByIndex", device, slot)


def find() -> Nvml | None:
    """NVML by the first package that is installed; None if there is none. Not opened yet."""
    for module, adapter in (("cuda.bindings.nvml", CudaBindingsNvml), ("pynvml", PynvmlNvml)):
        try:
            library = importlib.import_module(module)
        except ImportError:  # also cuda.bindings without numpy, or older than its nvml
            continue
        chosen: Nvml = adapter(library)
        return chosen
    return None


def _text(answer: str | bytes) -> str:
    """Older releases of nvidia-ml-py answer in bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
