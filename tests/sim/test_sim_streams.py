"""Streams and events whose work a test holds back, and what unmapping too early does."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
from simdriver import MIB, PAGE, Driver, run

LEGACY = 0
NON_BLOCKING = 1
NOT_READY = "CUDA_ERROR_NOT_READY"
SUCCESS = "CUDA_SUCCESS"


def stream(gpu: Driver, flags: int = NON_BLOCKING) -> int:
    return int(gpu.get("cuStreamCreate", flags))


def event(gpu: Driver, flags: int = 0) -> int:
    return int(gpu.get("cuEventCreate", flags))


def recorded(gpu: Driver, where: int) -> int:
    made = event(gpu)
    gpu.call("cuEventRecord", made, where)
    return made


def test_event_on_a_held_stream_is_not_ready() -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        held = stream(gpu)
        before = recorded(gpu, held)
        gpu.call("kvsim_hold_stream", held)
        after = recorded(gpu, held)
        answers = [gpu.ask("cuEventQuery", e) for e in (before, after, event(gpu))]
        answers.append(gpu.ask("cuStreamQuery", held))
        gpu.call("kvsim_release_stream", held)
        return [*answers, gpu.ask("cuEventQuery", after), gpu.ask("cuStreamQuery", held)]

    assert run(body) == [SUCCESS, NOT_READY, SUCCESS, NOT_READY, SUCCESS, SUCCESS]


def test_stream_may_be_held_more_than_once() -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        held = stream(gpu)
        gpu.call("kvsim_hold_stream", held)
        first = recorded(gpu, held)
        gpu.call("kvsim_hold_stream", held)
        second = recorded(gpu, held)
        gpu.call("kvsim_release_stream", held)
        answers = [gpu.ask("cuEventQuery", e) for e in (first, second)]
        gpu.call("kvsim_release_stream", held)
        return [*answers, gpu.ask("cuEventQuery", second), gpu.ask("kvsim_release_stream", held)]

    assert run(body) == [SUCCESS, NOT_READY, SUCCESS, "CUDA_ERROR_INVALID_VALUE"]


@pytest.mark.parametrize(
    ("flags", "expected"), [(0, [NOT_READY, NOT_READY]), (NON_BLOCKING, [SUCCESS, SUCCESS])]
)
def test_legacy_and_blocking_streams_wait_for_each_other(flags: int, expected: list[str]) -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        other = stream(gpu, flags)
        gpu.call("kvsim_hold_stream", LEGACY)
        behind_legacy = gpu.ask("cuEventQuery", recorded(gpu, other))
        gpu.call("kvsim_release_stream", LEGACY)
        gpu.call("kvsim_hold_stream", other)
        behind_other = gpu.ask("cuEventQuery", recorded(gpu, LEGACY))
        return [behind_legacy, behind_other]

    assert run(body) == expected


def test_stream_waits_for_the_event_of_another() -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        first, second = stream(gpu), stream(gpu)
        gpu.call("kvsim_hold_stream", first)
        fence = recorded(gpu, first)
        gpu.call("cuStreamWaitEvent", second, fence, 0)
        done = recorded(gpu, second)
        waiting = gpu.ask("cuEventQuery", done)
        gpu.call("cuEventDestroy_v2", fence)  # what waits for it goes on waiting
        still = gpu.ask("cuEventQuery", done)
        gpu.call("kvsim_release_stream", first)
        return [waiting, still, gpu.ask("cuEventQuery", done)]

    assert run(body) == [NOT_READY, NOT_READY, SUCCESS]


def test_event_refers_to_its_last_record() -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        held, idle = stream(gpu), stream(gpu)
        fence = recorded(gpu, idle)
        gpu.call("kvsim_hold_stream", held)
        gpu.call("cuEventRecord", fence, held)
        pending = gpu.ask("cuEventQuery", fence)
        gpu.call("cuEventRecord", fence, idle)
        return [pending, gpu.ask("cuEventQuery", fence)]

    assert run(body) == [NOT_READY, SUCCESS]


@pytest.mark.parametrize("what", ["event", "stream", "context"])
def test_synchronize_waits_for_the_release(what: str) -> None:
    def body() -> list[bool]:
        gpu = Driver().start()
        held = stream(gpu)
        gpu.call("kvsim_hold_stream", held)
        fence = recorded(gpu, held)
        context = gpu.get("cuCtxGetCurrent")
        waiting, done = threading.Event(), threading.Event()

        def wait() -> None:
            gpu.call("cuCtxSetCurrent", context)
            waiting.set()
            if what == "event":
                gpu.call("cuEventSynchronize", fence)
            elif what == "stream":
                gpu.call("cuStreamSynchronize", held)
            else:
                gpu.call("cuCtxSynchronize")
            done.set()

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        early = done.wait(0.02)
        gpu.call("kvsim_release_stream", held)
        thread.join()
        return [early, done.is_set()]

    assert run(body) == [False, True]


def test_work_on_a_held_stream_runs_in_order() -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        address, _ = gpu.mapped(1)
        held = stream(gpu)
        gpu.call("kvsim_hold_stream", held)
        gpu.call("cuMemsetD8Async", address, 1, PAGE, held)
        data = ctypes.create_string_buffer(b"\x02" * 16)
        gpu.call("cuMemcpyHtoDAsync_v2", address, data, 16, held)
        ctypes.memset(data, 9, 16)  # pageable memory: the driver has its copy
        gpu.call("cuMemcpyDtoDAsync_v2", address + MIB, address, 32, held)
        before = ctypes.string_at(address, 1)
        gpu.call("kvsim_release_stream", held)
        return [
            before.hex(),
            ctypes.string_at(address, 1).hex(),
            ctypes.string_at(address + MIB, 32).hex(),
        ]

    assert run(body) == ["00", "02", "02" * 16 + "01" * 16]


def test_synchronous_copies_and_fills() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        address, _ = gpu.mapped(2)
        gpu.call("cuMemcpyHtoD_v2", address + PAGE - 2, b"abcd", 4)  # over two mappings
        gpu.call("cuMemcpyDtoD_v2", address, address + PAGE - 2, 4)
        back = ctypes.create_string_buffer(4)
        gpu.call("cuMemcpyDtoH_v2", back, address, 4)
        gpu.call("cuMemsetD32_v2", address, 0x01020304, 2)
        odd = gpu.ask("cuMemsetD32_v2", address + 1, 0, 1)
        return [back.raw.decode(), ctypes.string_at(address, 8).hex(), odd]

    assert run(body) == ["abcd", "0403020104030201", "CUDA_ERROR_INVALID_VALUE"]


def test_unmapping_under_a_kernel_breaks_the_context() -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        address, _ = gpu.mapped(2)
        held = stream(gpu)
        gpu.call("kvsim_enqueue_read", held, address, 2 * PAGE)  # runs at once: all is mapped
        gpu.call("kvsim_hold_stream", held)
        gpu.call("kvsim_enqueue_read", held, address, 2 * PAGE)
        gpu.call("cuMemUnmap", address + PAGE, PAGE)  # nothing stops it, as on a GPU
        fine = gpu.ask("cuEventQuery", event(gpu))
        gpu.call("kvsim_release_stream", held)
        names = (("cuStreamQuery", held), ("cuCtxSynchronize",), ("cuMemUnmap", address, PAGE))
        return [fine, *(gpu.ask(*name) for name in names)]

    assert run(body) == [SUCCESS, *["CUDA_ERROR_ILLEGAL_ADDRESS"] * 3]


def test_unmapping_after_the_fence_is_safe() -> None:
    def body() -> str:
        gpu = Driver().start()
        address, _ = gpu.mapped(2)
        held = stream(gpu)
        gpu.call("kvsim_hold_stream", held)
        gpu.call("kvsim_enqueue_read", held, address, 2 * PAGE)
        fence = recorded(gpu, held)
        assert gpu.ask("cuEventQuery", fence) == NOT_READY
        gpu.call("kvsim_release_stream", held)
        gpu.call("cuEventSynchronize", fence)
        gpu.call("cuMemUnmap", address, 2 * PAGE)
        return gpu.ask("cuCtxSynchronize")

    assert run(body) == SUCCESS


def test_file_holds_the_streams_of_every_process(tmp_path: Path) -> None:
    held = tmp_path / "hold"

    def body() -> list[str]:
        gpu = Driver().start()
        where = stream(gpu)
        early = recorded(gpu, where)
        held.touch()
        fence = recorded(gpu, where)
        answers = [gpu.ask("cuEventQuery", e) for e in (early, fence)]
        held.unlink()
        gpu.call("cuEventSynchronize", fence)
        return answers

    assert run(body, KVSIM_HOLD=str(held)) == [SUCCESS, NOT_READY]


def test_contextless_thread_holds_first_devices_legacy_stream() -> None:
    def body() -> str:
        gpu = Driver().start()
        thread = threading.Thread(target=lambda: gpu.call("kvsim_hold_stream", LEGACY))
        thread.start()
        thread.join()
        return gpu.ask("cuEventQuery", recorded(gpu, LEGACY))

    assert run(body) == NOT_READY


def test_destroyed_stream_still_finishes_its_work() -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        first, second = stream(gpu), stream(gpu)
        gpu.call("kvsim_hold_stream", first)
        fence = recorded(gpu, first)
        gpu.call("cuStreamWaitEvent", second, fence, 0)
        done = recorded(gpu, second)
        gpu.call("cuStreamDestroy_v2", second)
        answers = [gpu.ask("cuStreamQuery", second), gpu.ask("cuEventQuery", done)]
        gpu.call("kvsim_release_stream", first)
        return [*answers, gpu.ask("cuEventQuery", done)]

    assert run(body) == ["CUDA_ERROR_INVALID_HANDLE", NOT_READY, SUCCESS]


def test_host_functions_run_in_order() -> None:
    def body() -> list[int]:
        gpu = Driver().start()
        held = stream(gpu)
        seen: list[int] = []
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: seen.append(data or 0))
        gpu.call("kvsim_hold_stream", held)
        gpu.call("cuLaunchHostFunc", held, callback, 7)
        before = len(seen)
        gpu.call("kvsim_release_stream", held)
        return [before, *seen]

    assert run(body) == [0, 7]


def test_elapsed_time_needs_two_finished_events_with_timing() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        held = stream(gpu)
        first = recorded(gpu, held)
        gpu.call("kvsim_hold_stream", held)
        last = recorded(gpu, held)
        ms = ctypes.c_float(-1)
        pending = gpu.ask("cuEventElapsedTime", ctypes.byref(ms), first, last)
        gpu.call("kvsim_release_stream", held)
        untimed = event(gpu, 2)
        gpu.call("cuEventRecord", untimed, held)
        without = gpu.ask("cuEventElapsedTime", ctypes.byref(ms), first, untimed)
        gpu.call("cuEventElapsedTime", ctypes.byref(ms), first, last)
        return [pending, without, ms.value >= 0]

    assert run(body) == [NOT_READY, "CUDA_ERROR_INVALID_HANDLE", True]


def test_call_blocks_while_its_stream_is_full() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        held, other = stream(gpu), stream(gpu)
        address, _ = gpu.mapped()
        gpu.call("kvsim_hold_stream", held)
        for _ in range(3):
            gpu.call("kvsim_enqueue_read", held, address, 16)
        made = event(gpu)
        done = threading.Event()

        def record() -> None:
            gpu.call("cuCtxSetCurrent", gpu.get("cuDevicePrimaryCtxRetain", 0))
            gpu.call("cuEventRecord", made, held)
            done.set()

        waits = threading.Thread(target=record)
        waits.start()
        recorded(gpu, other)  # another stream has room
        before = done.is_set(), gpu.ask("cuStreamQuery", held)
        gpu.call("kvsim_release_stream", held)
        waits.join()
        return [*before, gpu.ask("cuEventQuery", made)]

    assert run(body, KVSIM_QUEUE="4") == [False, NOT_READY, SUCCESS]


def test_lagging_work_runs_on_query_or_wait() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        address, _ = gpu.mapped()
        own = stream(gpu)
        gpu.call("cuMemsetD8Async", address, 7, 1, own)
        done = recorded(gpu, own)
        found: list[object] = [ctypes.string_at(address, 1).hex()]
        found += [gpu.ask("cuEventQuery", done) for _ in range(4)]
        found.append(ctypes.string_at(address, 1).hex())
        for wait, what in (("cuEventSynchronize", done), ("cuStreamSynchronize", own)):
            gpu.call("cuMemsetD8Async", address, len(found), 1, own)
            gpu.call("cuEventRecord", done, own)
            gpu.call(wait, what)
            found.append(ctypes.string_at(address, 1).hex())
        return found

    looks = [NOT_READY, NOT_READY, NOT_READY, SUCCESS]
    assert run(body, KVSIM_LAG="4") == ["00", *looks, "07", "06", "07"]


def test_work_behind_a_held_stream_lags_too() -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        held = stream(gpu)
        gpu.call("kvsim_hold_stream", held)
        done = recorded(gpu, held)
        answers = [gpu.ask("cuEventQuery", done) for _ in range(3)]
        gpu.call("kvsim_release_stream", held)
        return [*answers, gpu.ask("cuStreamQuery", held)]

    assert run(body, KVSIM_LAG="2") == [NOT_READY, NOT_READY, NOT_READY, SUCCESS]


def test_full_lagging_queue_accepts_the_next_entry() -> None:
    def body() -> str:
        gpu = Driver().start()
        address, _ = gpu.mapped()
        own = stream(gpu)
        for _ in range(5):
            gpu.call("cuMemsetD8Async", address, 7, 1, own)
        gpu.call("cuCtxSynchronize")
        return gpu.ask("cuStreamQuery", own)

    assert run(body, KVSIM_LAG="1000", KVSIM_QUEUE="2") == SUCCESS
