"""The child process that opens the GPUs; it writes each fact to stdout immediately.

Each line is a JSON object with fields of `GpuFacts`, or `gpu` with the fields of one `Gpu`.

Opening a GPU creates a context of some hundred MiB, and a broken driver may crash or hang. Both
affect only this process. The parent uses the lines written before that.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any


def main() -> None:
    """Write all facts; exit without the driver's cleanup, which may hang."""
    try:
        _report_all()
    except Exception as error:
        _report(child_end=f"failed: {type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(0)


def _report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _report_all() -> None:
    _report(nvml_error=_open("libnvidia-ml.so.1")[1])
    cuda, error = _open("libcuda.so.1")
    _report(library_error=error)
    if cuda is None:
        return
    # Call libcuda directly instead of the native module, so that a driver that is too old for the
    # module still reports its version.
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        _report(cuda_version=version.value)
    count = ctypes.c_int()
    for call, code in (
        ("cuInit", cuda.cuInit(0)),
        ("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count))),
    ):
        if code:
            _report(count=0, start_error=f"{call}: {_name_of(cuda, code)}")
            return
    _report(count=count.value)
    for ordinal in range(count.value):
        _report(gpu=_gpu(cuda, ordinal))


def _open(library: str) -> tuple[Any, str]:
    try:
        return ctypes.CDLL(library), ""
    except OSError as error:
        return None, str(error)


def _name_of(cuda: Any, code: int) -> str:
    name = ctypes.c_char_p()
    known = cuda.cuGetErrorName(code, ctypes.byref(name)) == 0 and name.value
    return f"{name.value.decode()} ({code})" if known and name.value else f"error {code}"


def _gpu(cuda: Any, ordinal: int) -> dict[str, Any]:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    named = (
        cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0
        and cuda.cuDeviceGetName(name, len(name), device) == 0
    )
    said = {"ordinal": ordinal, "name": name.value.decode(errors="replace") if named else ""}
    try:
        from kvelastic import _vmm

        driver = _vmm.CudaDriver(f"cuda:{ordinal}")
        return said | {
            "uuid": driver.uuid,
            "granularity_bytes": driver.granularity_bytes,
            "total_bytes": driver.total_bytes,
            "free_bytes": driver.free_bytes,
        }
    except Exception as error:
        return said | {"error": str(error)}


if __name__ == "__main__":
    main()
