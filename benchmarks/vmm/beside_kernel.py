"""Part 6a, GPU only: pages mapped and unmapped beside a running kernel.

A stream multiplies matrices that lie in the first pages of a range, while this thread maps and
unmaps a page behind them in the same range. Two questions: how much longer do the calls take than
on an idle GPU, and how much longer does the kernel take than when it is left alone. Rounds take
turns.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.vmm import driver_kinds, own_pages
from benchmarks.vmm.models import LLAMA_3_8B
from benchmarks.vmm.section import Section, median_p99, median_ratio, number

if TYPE_CHECKING:
    import torch

    from kvelastic import _vmm

TITLE = "Mapping beside a running kernel"
BF16_BYTES = 2
# Side 8192: 1.1 TFLOP, one to five milliseconds. The queue of a stream takes some 1024 entries,
# and a multiplication here is two of them: more would make this thread wait for the kernels.
FULL: dict[str, Any] = {"side": 8192, "kernels": 300, "rounds": 7}
QUICK: dict[str, Any] = {"side": 2048, "kernels": 50, "rounds": 2}


def measure(kind: str, *, side: int, kernels: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a kernel and microseconds of calls, each quiet and beside the other.

    A sample of the kernel is a round's median; one of the calls is one call.
    """
    import torch

    if not torch.cuda.is_available():
        return {"skipped": f"torch {torch.__version__} finds no CUDA device"}
    from kvelastic import _vmm
    from kvelastic.pool import tensors

    layout = LLAMA_3_8B.paged()
    matrix_bytes = side * side * BF16_BYTES
    data_pages = -(-3 * matrix_bytes // layout.page_bytes)
    seam = driver_kinds.open_seam(kind)
    assert isinstance(seam, _vmm.CudaDriver)
    memory = own_pages.reserve(seam, layout, data_pages + 1)
    memory.map(range(data_pages))
    # Unmapping waits for the streams that use the pages. The multiplications never use the last
    # page, so their stream is not named; with it named the wait would be for all of the queue.
    uses_last_page, multiplies = torch.cuda.Stream(), torch.cuda.Stream()
    seam.use_streams([uses_last_page.cuda_stream])
    flat = tensors.whole_range(memory)
    left, right, product = (
        flat[i * matrix_bytes : (i + 1) * matrix_bytes].view(torch.bfloat16).view(side, side)
        for i in range(3)
    )
    left.normal_()
    right.normal_()
    torch.cuda.synchronize()

    told: dict[str, Any] = {
        "kernel_quiet_ms": [], "kernel_beside_ms": [],
        "map_quiet_us": [], "map_beside_us": [], "unmap_quiet_us": [], "unmap_beside_us": [],
    }  # fmt: skip
    for turn in range(rounds + 1):
        quiet = _queue(torch, multiplies, left, right, product, kernels)
        multiplies.synchronize()
        beside = _queue(torch, multiplies, left, right, product, kernels)
        busy_calls: list[tuple[float, float]] = []
        while not beside[-1].query():
            busy_calls.append(_cycle_us(memory, data_pages))
        quiet_calls = [_cycle_us(memory, data_pages) for _ in range(max(len(busy_calls), 100))]
        if turn == 0:  # warms up
            continue
        told["kernel_quiet_ms"].append(_median_ms(quiet))
        told["kernel_beside_ms"].append(_median_ms(beside))
        for name, calls in (("quiet", quiet_calls), ("beside", busy_calls)):
            told[f"map_{name}_us"] += [each[0] for each in calls]
            told[f"unmap_{name}_us"] += [each[1] for each in calls]
    return told


def _queue(
    torch: Any,
    stream: torch.cuda.Stream,
    left: torch.Tensor,
    right: torch.Tensor,
    product: torch.Tensor,
    kernels: int,
) -> list[torch.cuda.Event]:
    """Gives the stream that many multiplications, an event before each and one at the end."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(kernels + 1)]
    with torch.cuda.stream(stream):
        for event in events[:-1]:
            event.record(stream)
            torch.matmul(left, right, out=product)
        events[-1].record(stream)
    return events


def _median_ms(events: list[torch.cuda.Event]) -> float:
    events[-1].synchronize()
    pairs = itertools.pairwise(events)
    return statistics.median(before.elapsed_time(after) for before, after in pairs)


def _cycle_us(memory: _vmm.Range, page: int) -> tuple[float, float]:
    """Microseconds to map a page, and to unmap it."""
    start = time.perf_counter_ns()
    memory.map([page])
    mapped = time.perf_counter_ns()
    memory.unmap([page])
    return (mapped - start) / 1000, (time.perf_counter_ns() - mapped) / 1000


def sections(data: dict[str, Any], kind: driver_kinds.DriverKind) -> list[Section]:
    slower = median_ratio(data["kernel_beside_ms"], data["kernel_quiet_ms"])
    rows = [
        (
            "kernel, ms",
            number(statistics.median(data["kernel_quiet_ms"])),
            number(statistics.median(data["kernel_beside_ms"])),
            f"{slower:.3f}",
        )
    ]
    for call in ("map", "unmap"):
        quiet, beside = data[f"{call}_quiet_us"], data[f"{call}_beside_us"]
        ratio = f"{statistics.median(beside) / statistics.median(quiet):.2f}" if beside else ""
        rows.append((f"{call}, us", median_p99(quiet), median_p99(beside) if beside else "", ratio))
    notes = [f"{len(data['map_beside_us'])} cycles of a 16 MiB page beside the kernels."]
    return [Section(TITLE, ("", "quiet", "beside", "ratio"), rows, notes)]
