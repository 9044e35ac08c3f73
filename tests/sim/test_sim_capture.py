"""CUDA graphs that are being captured, and the calls that end them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
from simdriver import MIB, Driver, run

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
BLOCKING, NON_BLOCKING = 0, 1
LEGACY = 0
SUCCESS = "CUDA_SUCCESS"
UNSAFE = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
LOST = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"


def begun(gpu: Driver, mode: int, flags: int = NON_BLOCKING) -> int:
    """A stream that is being captured."""
    stream = int(gpu.get("cuStreamCreate", flags))
    gpu.call("cuStreamBeginCapture_v2", stream, mode)
    return stream


def end(gpu: Driver, stream: int) -> str:
    return gpu.ask("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_uint64()))


def exchange(gpu: Driver, mode: int) -> int:
    changed = ctypes.c_int(mode)
    gpu.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(changed))
    return changed.value


def in_a_thread(gpu: Driver, call: Callable[[], str]) -> str:
    context = gpu.get("cuCtxGetCurrent")
    said: list[str] = []

    def work() -> None:
        gpu.call("cuCtxSetCurrent", context)
        said.append(call())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return said[0]


@pytest.mark.parametrize(
    ("capture", "own", "other"),
    [(GLOBAL, UNSAFE, UNSAFE), (THREAD_LOCAL, UNSAFE, SUCCESS), (RELAXED, SUCCESS, SUCCESS)],
)
def test_unsafe_call_ends_a_capture_by_its_mode(capture: int, own: str, other: str) -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        said = []
        for call in (lambda: gpu.ask("cuCtxSynchronize"), lambda: gpu.ask("cuMemFree_v2", 0)):
            stream = begun(gpu, capture)
            said += [call(), end(gpu, stream)]
            stream = begun(gpu, capture)
            said += [in_a_thread(gpu, call), end(gpu, stream)]
        return said

    ended = {UNSAFE: LOST, SUCCESS: SUCCESS}
    assert run(body) == 2 * [own, ended[own], other, ended[other]]


@pytest.mark.parametrize(
    ("thread", "expected"), [(GLOBAL, UNSAFE), (THREAD_LOCAL, SUCCESS), (RELAXED, SUCCESS)]
)
def test_thread_mode_allows_calls_during_global_capture(thread: int, expected: str) -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        stream = begun(gpu, GLOBAL)

        def call() -> str:
            before = exchange(gpu, thread)
            assert before == GLOBAL, "what a thread begins with"
            said = gpu.ask("cuMemCreate", ctypes.byref(ctypes.c_uint64()), MIB, None, 0)
            assert exchange(gpu, GLOBAL) == thread
            return "refused" if said == UNSAFE else "carried out"

        return [in_a_thread(gpu, call), end(gpu, stream)]

    assert run(body) == [
        "refused" if expected == UNSAFE else "carried out",
        LOST if expected == UNSAFE else SUCCESS,
    ]


def test_legacy_stream_work_ends_captures_of_blocking_streams() -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        event = gpu.get("cuEventCreate", 0)
        said = []
        for flags in (NON_BLOCKING, BLOCKING):
            stream = begun(gpu, GLOBAL, flags)
            said += [gpu.ask("cuEventRecord", event, LEGACY), end(gpu, stream)]
        return said

    assert run(body) == [SUCCESS, SUCCESS, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", LOST]


def test_captured_work_does_not_run() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        address, _ = gpu.mapped(1)
        event = gpu.get("cuEventCreate", 0)
        stream = begun(gpu, GLOBAL)
        gpu.call("cuMemsetD8Async", address, 7, 16, stream)
        gpu.call("cuEventRecord", event, stream)
        ended = end(gpu, stream)
        query = gpu.ask("cuEventQuery", event)
        gpu.call("cuEventRecord", event, stream)
        again = end(gpu, stream)
        finished = gpu.ask("cuEventQuery", event)
        return [ended, query, finished, again, ctypes.string_at(address, 1)[0]]

    assert run(body) == [
        SUCCESS,
        "CUDA_ERROR_CAPTURED_EVENT",
        SUCCESS,
        "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        0,
    ]


def test_synchronizing_a_captured_stream_ends_the_capture() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        exchange(gpu, RELAXED)
        stream = begun(gpu, RELAXED)
        status = ctypes.c_int()
        gpu.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        said = [status.value, gpu.ask("cuStreamSynchronize", stream)]
        gpu.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return [*said, status.value, end(gpu, stream)]

    assert run(body) == [1, UNSAFE, 2, LOST]
