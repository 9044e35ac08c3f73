"""The decode of benchmarks/gpu on the simulated driver, with kernels that are late, as on a GPU.

    late_decode.py TOKENS              prints what came of it as JSON
    late_decode.py TOKENS no-fences    the same where nothing waits for kernels

The processor computes what the kernels would, in a thread behind the host. A kernel runs as late as
it may: when the host is as far ahead as it gets, or when the driver has asked whether the stream is
done, as an unmap does that waits for kernels. A kernel of the simulated stream lasts until then. So
a page that is unmapped without waiting for the stream is gone when its kernel runs. That kernel
reads the scratch of a guard page; without guard pages it ends the process, as it would lose a GPU's
context.

No speed decides what happens. The host waits for a lower limit until the pool is over it, and, when
it has freed the last block of a page over the limit, until a page is unmapped.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import torch
from gpu_kernels import Gpu
from simulated_gpu import seams
from waiting import DEADLINE_S, wait_until

from benchmarks.gpu.kernels import decode, runtime
from benchmarks.gpu.kernels.pressure import Pressure
from kvelastic.device.selection import Device
from kvelastic.pool import tensors

WORK: Final = replace(decode.ON_HOST, steps_a_limit=36)
"""At the first lower limit its slots have more blocks than a page has: one has to go."""


class LateRun(decode.Run):
    """Kernels run in a thread, in order; a gate of the simulated stream stands for each."""

    _answer_s = DEADLINE_S

    def _open(self, streams: list[int]) -> Device:
        assert not streams
        self._gpu = Gpu()
        self._kernels: queue.Queue[Callable[[], None] | None] = queue.Queue(decode.STEPS_AHEAD)
        self._is_over = False
        self._looks_seen = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()
        return super()._open([self._gpu.stream])

    def _queue(self, kernels: Callable[[], None]) -> None:
        self._gpu.hold()
        self._kernels.put(kernels)

    def _compute(self) -> None:
        self._gpu.enter()
        wait_until(self._is_kernel_due)
        while (kernels := self._kernels.get()) is not None:
            try:
                kernels()
            except BaseException as failure:
                self._failure = failure
            self._gpu.release()
            wait_until(self._is_kernel_due)

    def _is_kernel_due(self) -> bool:
        if self._kernels.empty():
            self._looks_seen = self._gpu.count("cuEventQuery")
            return False
        return (
            self._is_over
            or self._kernels.full()
            or self._gpu.count("cuEventQuery") > self._looks_seen
        )

    def _wait_for_kernels(self) -> None:
        self._is_over = True
        self._kernels.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _change_limit(self, under: Pressure) -> None:
        if under.is_settled:
            under.next()
            wait_until(lambda: under.is_settled or self._cache.pool.blocks.is_over_limit)

    def _release(self, ids: list[int]) -> None:
        unmapped = self._pages_unmapped()
        super()._release(ids)
        used = self._pages_of(block for each in self._schedule.running for block in each.ids)
        if self._pages_of(ids) - used - {0}:
            blocks = self._cache.pool.blocks
            wait_until(lambda: not blocks.is_over_limit or self._pages_unmapped() > unmapped)

    def _pages_of(self, ids: Iterable[int]) -> set[int]:
        return {block // self._cache.blocks_per_page for block in ids}

    def _pages_unmapped(self) -> int:
        return self._cache.pool.blocks.stats()["pages_unmapped_ever"]


def main() -> None:
    torch.set_num_threads(1)
    tensors.whole_range = seams.whole_range
    where = runtime.eager()
    control = sys.argv[2] if len(sys.argv) > 2 else None
    told = decode.run(where, WORK, int(sys.argv[1]), control=control, kind=LateRun)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
