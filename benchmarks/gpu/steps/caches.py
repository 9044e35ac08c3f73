"""datadist's caches on a GPU: deallocated memory comes back, a copy is whole when it returns."""

from __future__ import annotations

import threading

from benchmarks.gpu.driver_calls import DriverCalls
from benchmarks.gpu.findings import Findings
from kvelastic import _vmm
from kvelastic.config import load
from kvelastic.datadist.byte_copies import copy_runs, copy_to_host
from kvelastic.datadist.cache_layout import Run
from kvelastic.datadist.cache_memory import CacheMemory
from kvelastic.datadist.memory_config import MemPool
from kvelastic.device.selection import resolve

TENSORS = 4
PATTERN, OTHER = 7, 9
DEFAULT = 0
KERNEL_S = 0.2


def main() -> None:
    with Findings.of_command(__doc__) as found:
        tensor_bytes = (8 if found.quick else 64) << 20
        cuda, settings = DriverCalls(), load()
        device = resolve("cuda:0", settings)
        memory = CacheMemory(device, MemPool(16 * TENSORS * tensor_bytes), settings, wait_s=1.0)
        blocks = memory.pool.blocks
        one, other = (memory.alloc(TENSORS, tensor_bytes) for _ in range(2))
        assert one is not None
        assert other is not None
        gpu = device.driver()
        assert isinstance(gpu, _vmm.CudaDriver)
        cuda.fill(one.addresses[0], OTHER, tensor_bytes, DEFAULT)
        cuda.error()
        back = bytearray(tensor_bytes)

        def copy() -> None:
            whole = Run(0, 0, tensor_bytes)
            copy_runs([(whole, whole)], one.addresses, other.addresses, trusted=True, gpu=gpu)
            copy_to_host(other.addresses[0], memoryview(back), gpu=gpu)

        copying = threading.Thread(target=copy)
        with cuda.busy(DEFAULT, KERNEL_S):
            cuda.fill(one.addresses[0], PATTERN, tensor_bytes, DEFAULT)
            copying.start()
        copying.join()
        found.check(
            "a copy has what a kernel of the default stream wrote before it",
            back == bytes([PATTERN]) * tensor_bytes,
        )
        held_bytes = blocks.mapped_bytes
        one.free()
        other.free()
        blocks.trim()
        left_bytes = blocks.mapped_bytes
        found.check(
            "deallocated memory is unmapped", left_bytes < held_bytes // 2, f"{left_bytes} bytes"
        )
        found.line(f"{held_bytes >> 20} MiB of caches, {left_bytes >> 20} MiB after trim.")
        memory.close()
        found.check("nothing is mapped at the end", blocks.mapped_bytes == 0)


if __name__ == "__main__":
    main()
