"""A worker of a ring on the simulated GPU: `gpu_ring_worker.py SEGMENT LAYOUT PAGES [RANK]`.

As ring_worker.py it prints `ready`, and answers each line of its stdin with one line:

    hold, release     a kernel begins on the worker's stream, which is not a blocking one; it ends
    read PAGE         queue a kernel that reads a page                            -> done
    fill COUNT        queue so many kernels that read page 0                      -> done
    capture, captured begin a capture of another stream; end it                   -> done, 0 or 901
    name              say that kernels run on this stream                         -> done
    fail PLAN         a fault plan of the simulator, `none` ends it               -> done
    calls NAME...     how often these functions were called                       -> 3 1
    threads yes|no    whether the system starts a thread for this process         -> done
    error             what the context answers                                    -> 0
    mapped            page indices that are mapped                                -> 0 1 2
    stop              stop serving                                                -> done
"""

from __future__ import annotations

import ctypes
import sys


def main() -> None:
    from gpu_kernels import Gpu
    from native_pools import LAYOUTS

    from kvelastic import _vmm
    from kvelastic.pool.pool import native_geometry
    from kvelastic.shared import segment

    name, layout, pages = sys.argv[1], LAYOUTS[sys.argv[2]], int(sys.argv[3])
    rank = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    gpu = Gpu()
    memory = _vmm.Range.reserve(gpu.driver, native_geometry(layout, pages))
    opened = segment.open_writable(name)
    worker = _vmm.RingWorker.start(opened.control_block, memory, rank)
    graph = gpu.new_stream()
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        answer = "done"
        if command == "hold":
            gpu.hold()
        elif command == "release":
            gpu.release()
        elif command == "read":
            offset = int(arguments[0]) * layout.extent_bytes
            gpu.read(memory.address + offset, layout.extent_bytes)
        elif command == "fill":
            for _ in range(int(arguments[0])):
                gpu.read(memory.address, 1)
        elif command == "capture":
            gpu.begin_capture(stream=graph)
        elif command == "captured":
            answer = str(gpu.end_capture(stream=graph))
        elif command == "name":
            gpu.driver.use_streams([gpu.stream])
        elif command == "fail":
            plan = "" if arguments == ["none"] else arguments[0]
            assert gpu.sim.kvsim_fail(plan.encode()) == 0
        elif command == "calls":
            answer = " ".join(str(gpu.count(each)) for each in arguments)
        elif command == "threads":
            set_stack_bytes(8 << 20 if arguments == ["yes"] else 1 << 46)
        elif command == "error":
            answer = str(gpu.error())
        elif command == "mapped":
            answer = " ".join(str(p) for p in range(pages) if memory.is_mapped(p))
        elif command == "stop":
            worker.stop()
        print(answer, flush=True)


def set_stack_bytes(size_bytes: int) -> None:
    """Set the stack of later threads; where the address space has no room for it, none starts."""
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(64)  # glibc's pthread_attr_t has 56 bytes
    assert libc.pthread_attr_init(attributes) == 0
    assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size_bytes)) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0


if __name__ == "__main__":
    main()
