"""A server's worker that starts on the simulated GPU: `starting_server.py elastic|stock`.

As a program it prints `ready`, and answers each line of its stdin with one line:

    look            vLLM measures for the first time: the context is there, nothing else  -> done
    torch BYTES     torch's allocator takes so much                                       -> done
    outside BYTES   libraries take so much beside it                                      -> done
    reserve         what an elastic server is to reserve                                  -> 2147483

torch itself is a stand-in. With `TEST_NVML` there is a `pynvml` that answers by what the simulated
driver has of each process that has said `look`: in a folder of that name, under the pid plus
`TEST_NVML_SHIFT`, as in a container; with `TEST_NVML=blind` 0 bytes of each.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from processes import LineProgram


class StartingServer(LineProgram):
    """The process, from outside."""

    def __init__(self, kind: str, environment: dict[str, str]) -> None:
        super().__init__(__file__, kind, environment=environment)
        self.is_elastic = kind == "elastic"
        self.torch_bytes = self.outside_bytes = 0

    def take(self, torch_bytes: int = 0, outside_bytes: int = 0) -> None:
        """More of either."""
        self.torch_bytes += torch_bytes
        self.outside_bytes += outside_bytes
        if torch_bytes:
            assert self.ask(f"torch {torch_bytes}") == "done"
        if outside_bytes:
            assert self.ask(f"outside {outside_bytes}") == "done"


def _simulated_nvml(folder: Path, driver: Any) -> ModuleType:
    import fake_nvml

    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.kvsim_process_bytes.restype = ctypes.c_uint64
    shift = int(os.environ.get("TEST_NVML_SHIFT", "0"))

    class Nvml(fake_nvml.FakeNvml):
        def processes(self, device: object, kind: Any) -> list[tuple[int, int | None]]:
            if kind != "compute":
                return []
            pids = [int(path.name) for path in folder.iterdir()]
            is_blind = os.environ["TEST_NVML"] == "blind"
            return [
                (pid + shift, 0 if is_blind else int(cuda.kvsim_process_bytes(0, pid)))
                for pid in pids
            ]

    return fake_nvml.pynvml_module(Nvml([fake_nvml.FakeGpu(uuid=driver.uuid)]))


def main() -> None:
    from kvelastic import _vmm
    from kvelastic.integration.vllm import in_worker, worker_device

    driver = _vmm.CudaDriver("cuda:0")
    held: dict[str, int] = {"torch": 0, "outside": 0}

    def memory(*_: object) -> tuple[int, int]:
        return driver.free_bytes, driver.total_bytes

    sys.modules["torch"] = torch = ModuleType("torch")
    vars(torch)["accelerator"] = SimpleNamespace(
        get_memory_info=memory,
        memory_reserved=lambda *_: held["torch"],
        memory_stats=lambda *_: {"reserved_bytes.all.peak": held["torch"]},
    )
    facts = worker_device.DeviceFacts(driver.uuid, driver.total_bytes)
    worker = SimpleNamespace(device="cuda:0")
    setattr(worker, worker_device._KEPT, worker_device.WorkerDevice(facts, driver))
    if "TEST_NVML" in os.environ:
        folder = Path(os.environ["TEST_NVML_FOLDER"])
        sys.modules["pynvml"] = _simulated_nvml(folder, driver)
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        answer = "done"
        if command == "look":
            if "TEST_NVML" in os.environ:
                (folder / str(os.getpid())).touch()
            if sys.argv[1] == "elastic":
                with in_worker.measuring(worker):
                    in_worker.memory_info(memory)
        elif command in held:
            size_bytes = int(arguments[0])
            driver.create(size_bytes)
            held[command] += size_bytes
        elif command == "reserve":
            answer = str(in_worker.hand_over_reserve(worker))
        print(answer, flush=True)


if __name__ == "__main__":
    main()
