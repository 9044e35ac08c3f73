"""The decode of benchmarks/gpu on the simulated driver, with kernels that are late, as on a GPU.

    late_decode.py TOKENS              prints what came of it as JSON
    late_decode.py TOKENS no-fences    the same where nothing waits for kernels

The processor computes what the kernels would, in a thread of its own, behind the host; a kernel of
the simulated stream lasts as long as each of them is not done. So a page that is unmapped without
waiting for that stream is gone when its kernel runs. That kernel reads the scratch of a guard page;
one that reads just between the page and the scratch ends the process, as it would lose a GPU's
context.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable

import torch
from gpu_kernels import Gpu
from simulated_gpu import seams

from benchmarks.gpu.kernels import decode, runtime
from kvelastic.device.selection import Device
from kvelastic.pool import tensors

LATE_EVERY = 16
LATE_S = 0.02
"""How long every sixteenth kernel lasts besides what it computes."""


class LateRun(decode.Run):
    """Kernels run in a thread, in order; a gate of the simulated stream stands for each."""

    def _open(self, streams: list[int]) -> Device:
        assert not streams
        self._gpu = Gpu()
        self._kernels: queue.Queue[Callable[[], None] | None] = queue.Queue(decode.STEPS_AHEAD)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()
        return super()._open([self._gpu.stream])

    def _queue(self, kernels: Callable[[], None]) -> None:
        self._gpu.hold()
        self._kernels.put(kernels)

    def _compute(self) -> None:
        self._gpu.enter()
        done = 0
        while (kernels := self._kernels.get()) is not None:
            if done % LATE_EVERY == 0:
                time.sleep(LATE_S)
            try:
                kernels()
            except BaseException as failure:
                self._failure = failure
            self._gpu.release()
            done += 1

    def _wait_for_kernels(self) -> None:
        self._kernels.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def main() -> None:
    torch.set_num_threads(1)
    tensors.whole_range = seams.whole_range
    where = runtime.eager()
    control = sys.argv[2] if len(sys.argv) > 2 else None
    told = decode.run(where, decode.ON_HOST, int(sys.argv[1]), control=control, kind=LateRun)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
