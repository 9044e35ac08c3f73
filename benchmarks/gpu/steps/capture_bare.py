"""Which of the bare calls end a capture in global mode, and which of them RELAXED permits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from benchmarks.gpu.driver_calls import GLOBAL, RELAXED, SUCCESS, DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.vmm.section import Section

PAGE_BYTES = 2 << 20


def main() -> None:
    with Findings.of_command(__doc__) as found:
        cuda = DriverCalls()
        calls = _calls(cuda)
        rows = []
        ends_relaxed = []
        for name, call in calls.items():
            cells = [name]
            for mode in (GLOBAL, RELAXED):
                stream = cuda.new_stream()
                before = cuda.exchange_mode(mode)
                cuda.begin_capture(stream, GLOBAL)
                try:
                    call()
                    said = SUCCESS
                except Exception as error:
                    said = str(error)
                answer = cuda.end_capture(stream)
                cuda.exchange_mode(before)
                went_on = answer == SUCCESS
                cells.append("goes on" if went_on and said == SUCCESS else f"{said}; {answer}")
                if mode == RELAXED and not (went_on and said == SUCCESS):
                    ends_relaxed.append(name)
            rows.append(tuple(cells))
        found.table(
            Section("A capture in global mode beside a call", ("call", "global", "relaxed"), rows)
        )
        found.figure("ends_a_relaxed_capture", ends_relaxed)
        found.check("in relaxed mode every call goes on", not ends_relaxed, ", ".join(ends_relaxed))


def _calls(cuda: DriverCalls) -> dict[str, Callable[[], object]]:
    """Each can be repeated; what it needs is made before."""
    address, handle = cuda.reserve(PAGE_BYTES), cuda.create(PAGE_BYTES)
    event = int(cuda.get("cuEventCreate", 2))  # without timing
    other = cuda.new_stream()
    handles: list[int] = []

    def unmap() -> None:
        cuda.unmap(address, PAGE_BYTES)
        cuda.map(address, PAGE_BYTES, handle)
        cuda.set_access(address, PAGE_BYTES)

    cuda.map(address, PAGE_BYTES, handle)
    cuda.set_access(address, PAGE_BYTES)
    return {
        "cuMemCreate": lambda: handles.append(cuda.create(PAGE_BYTES)),
        "cuMemRelease": lambda: cuda.destroy(cuda.create(PAGE_BYTES), PAGE_BYTES),
        "cuMemSetAccess": lambda: cuda.set_access(address, PAGE_BYTES),
        "cuMemUnmap, cuMemMap": unmap,
        "cuMemAddressReserve, Free": lambda: cuda.release(cuda.reserve(PAGE_BYTES), PAGE_BYTES),
        "cuMemGetInfo": cuda.free_bytes,
        "cuEventRecord in another stream": lambda: cuda.call("cuEventRecord", event, other),
        "cuEventQuery": lambda: cuda.call("cuEventQuery", event),
        "cuStreamIsCapturing": lambda: cuda.call(
            "cuStreamIsCapturing", other, ctypes.byref(ctypes.c_int())
        ),
        "cuStreamCreate": cuda.new_stream,
    }


if __name__ == "__main__":
    main()
