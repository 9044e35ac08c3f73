"""The part of NVML (NVIDIA's management library) that kvelastic uses. No CUDA context needed.

    nvml = find()                   # None: nvidia-ml-py is not installed
    nvml.start()                    # call stop() once for every start()
    try:
        total_bytes, free_bytes = nvml.memory(nvml.device(0))
    finally:
        nvml.stop()

Uses `pynvml`, the module of nvidia-ml-py, which the extra `cuda` installs. Every failure is an
`NvmlError` whose message says what to do.
"""

from __future__ import annotations

import importlib
from enum import IntEnum
from typing import Any, Final, Literal

from kvelastic.errors import NvmlError

INSTALL: Final = "pip install 'kvelastic[cuda]'"

ProcessKind = Literal["compute", "graphics", "mps"]
PROCESS_KINDS: Final[tuple[ProcessKind, ...]] = ("compute", "graphics", "mps")

NOT_AVAILABLE_BYTES: Final = 2**64 - 1
"""NVML's value for unknown memory of a process."""

_MIG_ENABLED: Final = 1


class Status(IntEnum):
    """NVML's error numbers that kvelastic handles."""

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
        "the GPU is lost: it no longer responds to the driver; look for Xid in `dmesg`, then reset"
        " it"
        " or restart the machine"
    ),
    Status.RESET_REQUIRED: "the GPU needs a reset; run `nvidia-smi --gpu-reset -i N` as root",
    Status.LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver's library and its kernel module are of different versions, as after an"
        " update; restart the machine (or the container)"
    ),
    Status.UNKNOWN: "NVML failed and does not know why; `nvidia-smi` and `dmesg` may say more",
}


def nvml_error(status: int, detail: str = "") -> NvmlError:
    """Return the error for an NVML error number; its message says what to do."""
    words = _WORDS.get(status) or f"NVML answered with error {_name_of(status)}"
    return NvmlError(f"{words} ({detail})" if detail else words, status)


def _name_of(status: int) -> str:
    try:
        return f"{status} ({Status(status).name})"
    except ValueError:
        return str(status)


class Nvml:
    """NVML through nvidia-ml-py. Every call may raise `NvmlError`.

    A device is an opaque handle, valid until `stop`. A MIG instance is a device too.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def _ask(self, function: str, *arguments: object) -> Any:
        try:
            return getattr(self._library, function)(*arguments)
        except self._library.NVMLError as error:
            raise nvml_error(int(error.value)) from error
        except AttributeError as error:  # missing in the package or the driver
            raise nvml_error(Status.FUNCTION_NOT_FOUND, str(error)) from error
        except Exception as error:  # an unexpected error must not hide other devices
            raise nvml_error(Status.UNKNOWN, repr(error)) from error

    def _ask_twice(self, function: str, *arguments: object) -> Any:
        """Call again if the list grew: pynvml first queries the count, then that many entries."""
        try:
            return self._ask(function, *arguments)
        except NvmlError as error:
            if error.status != Status.INSUFFICIENT_SIZE:
                raise
            return self._ask(function, *arguments)

    def start(self) -> None:
        """Open NVML; if this does not raise, call `stop` later."""
        self._ask("nvmlInit")

    def stop(self) -> None:
        """Close NVML."""
        self._ask("nvmlShutdown")

    def driver_version(self) -> str:
        """Return the version of the NVIDIA driver, such as `580.65.06`."""
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def count(self) -> int:
        """Return the number of GPUs, including unresponsive ones."""
        return int(self._ask("nvmlDeviceGetCount"))

    def device(self, index: int) -> object:
        """Return the GPU of that index in NVML's order, by bus; CUDA's order may differ."""
        return self._ask("nvmlDeviceGetHandleByIndex", index)

    def name(self, device: object) -> str:
        """Return the product name."""
        return _text(self._ask("nvmlDeviceGetName", device))

    def uuid(self, device: object) -> str:
        """Return the UUID: `GPU-...`, or `MIG-...` of a MIG instance."""
        return _text(self._ask("nvmlDeviceGetUUID", device))

    def memory(self, device: object) -> tuple[int, int]:
        """Return total and free bytes."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", device)
        return int(memory.total), int(memory.free)

    def processes(self, device: object, kind: ProcessKind) -> list[tuple[int, int | None]]:
        """Return (pid, bytes) of each process of that kind.

        Bytes are None or `NOT_AVAILABLE_BYTES` if unknown.
        """
        which = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}[kind]
        # Use the versioned name: the other one fails if package and driver have different ages.
        found = self._ask_twice(f"nvmlDeviceGet{which}RunningProcesses_v3", device)
        return [(int(process.pid), process.usedGpuMemory) for process in found]

    def is_mig_on(self, device: object) -> bool:
        """Return whether the GPU is split into MIG instances."""
        return int(self._ask("nvmlDeviceGetMigMode", device)[0]) == _MIG_ENABLED

    def mig_slots(self, device: object) -> int:
        """Return the maximum number of MIG instances."""
        return int(self._ask("nvmlDeviceGetMaxMigDeviceCount", device))

    def mig_device(self, device: object, slot: int) -> object:
        """Return the MIG instance in that slot; raises with `NOT_FOUND` if the slot is empty."""
        return self._ask("nvmlDeviceGetMigDeviceHandleByIndex", device, slot)


def find() -> Nvml | None:
    """Return NVML, not started; None if nvidia-ml-py is not installed."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    return Nvml(library)


def _text(answer: str | bytes) -> str:
    """Decode a string; older releases of nvidia-ml-py return bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
