"""The cost of where blocks lie: one Triton kernel over paged, per-block and per-layer caches.

    python -m benchmarks.gpu.kernels.attention                 needs a GPU (exit status 77 without)
    python -m benchmarks.gpu.kernels.attention --quick         short contexts and few rounds
    python -m benchmarks.gpu.kernels.attention --interpret     answers only, on any processor

A step is attention of one token a request in all layers. Each placement is measured beside a dense
cache with the same contents, and the dense cache beside itself as a control, in turns, as CUDA
graphs. Pages lie spread over a range of up to 60 GiB, so ids reach far beyond 2^31 elements; every
answer has to be that of the dense cache, bit by bit, and that one close to torch's own attention.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import harness
from benchmarks.gpu.kernels import runtime
from benchmarks.gpu.kernels.paged_attention import PagedAttention, relative_error, splits_for
from benchmarks.gpu.kernels.runtime import NEEDS_GPU, NeedsGpuError, Runtime
from benchmarks.vmm import cache_layouts
from benchmarks.vmm.cache_layouts import Cache
from benchmarks.vmm.decode_attention import replay_ms
from benchmarks.vmm.models import GIB, LLAMA_3_8B, MIB, Model
from benchmarks.vmm.section import Section, median_ratio, number

if TYPE_CHECKING:
    import torch

    from kvelastic import _vmm

TITLE: Final = "Decode attention by where blocks lie"
RANGE_BYTES: Final = 60 * GIB
WORKSPACE_BYTES: Final = 3 * GIB
MOST_RATIO: Final = 1.01
BAR: Final = "at the default page at most 1.01 of dense"
MOST_ERROR: Final = 0.01
"""Of a step's answer beside torch's own attention in float32; a wrong block of 256 is 0.09."""
WARMING_TURNS: Final = 3
TINY: Final = Model("tiny", layers=2, query_heads=4, kv_heads=2, head_dim=64)


@dataclass(frozen=True)
class Work:
    """What is measured."""

    model: Model
    batches: tuple[int, ...]
    tokens: int
    pages_mib: tuple[int, ...]
    rounds: int
    """0: only the answers."""


FULL: Final = Work(LLAMA_3_8B, (1, 4, 16, 64), 4096, (2, 16, 64, 128), 30)
QUICK: Final = Work(LLAMA_3_8B, (1, 4), 1024, (2, 16, 128), 5)
INTERPRETED: Final = Work(TINY, (2,), 80, (2, 4), 0)


def measure(where: Runtime, work: Work) -> dict[str, Any]:
    """`by_layout[layout][B]`: samples, and whether the answers are right."""
    import torch

    driver = where.open_driver()
    model = work.model
    per_request = work.tokens // model.tokens_per_block
    fitting = [
        batch
        for batch in work.batches
        if not where.is_gpu or 2 * batch * per_request * model.block_all_bytes <= _free_bytes()
    ]
    if not fitting:
        raise NeedsGpuError("a GPU with memory for two caches of one request")
    blocks = max(fitting) * per_request
    default_bytes = _default_page_bytes(model, driver)
    torch.manual_seed(1)
    dense = cache_layouts.dense(model, blocks, where.device, where.dtype)
    steps = [Step(where, model, batch, per_request, blocks) for batch in fitting]
    told: dict[str, Any] = {}
    for make in _makers(work, where, driver, blocks, default_bytes):
        cache = make()
        cache.fill_as(dense)
        told[cache.name] = {
            "highest_element": int(cache.ids.max()) * cache.layers[0][0].stride(0),
            "by_batch": {
                str(step.batch): step.compare(dense, cache, work.rounds) for step in steps
            },
        }
        where.synchronize()
        del cache
        gc.collect()  # the pages go back before the next layout wants them
    return {
        **where.facts(),
        "model": model.name,
        "tokens": work.tokens,
        "range_bytes": RANGE_BYTES,
        "default_layout": cache_layouts.paged_name(default_bytes),
        "left_out": [batch for batch in work.batches if batch not in fitting],
        "error_beside_torch": {str(step.batch): step.error_beside_torch(dense) for step in steps},
        "by_layout": told,
    }


def _free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0]) - WORKSPACE_BYTES


def _default_page_bytes(model: Model, driver: _vmm.Driver) -> int:
    """What a pool on this device would start from, by its driver's prices."""
    from kvelastic import _vmm
    from kvelastic.device import page_size

    if not isinstance(driver, _vmm.CudaDriver):
        return model.paged().extent_bytes
    price_us = page_size.measured_price_us(driver)
    return model.paged(page_size.for_price(price_us, driver.total_bytes)).extent_bytes


def _makers(
    work: Work, where: Runtime, driver: _vmm.Driver, blocks: int, default_bytes: int
) -> Iterator[Callable[[], Cache]]:
    model, options = work.model, {"range_bytes": RANGE_BYTES, "dtype": where.dtype}
    for page_bytes in sorted({default_bytes, *(mib * MIB for mib in work.pages_mib)}):
        yield partial(cache_layouts.paged, model, driver, blocks, page_bytes, **options)
    yield lambda: cache_layouts.per_block(model, driver, blocks, **options)
    yield lambda: cache_layouts.per_layer(model, driver, blocks, **options)


class Step:
    """One token's attention for so many requests, over whichever cache has their blocks."""

    def __init__(
        self, where: Runtime, model: Model, batch: int, per_request: int, blocks: int
    ) -> None:
        import torch

        self.batch = batch
        self._model = model
        tokens = per_request * model.tokens_per_block
        processors = (
            torch.cuda.get_device_properties(0).multi_processor_count if where.is_gpu else 3
        )
        self._attention = PagedAttention(
            requests=batch,
            model=model,
            splits=splits_for(batch, model.kv_heads, tokens, processors),
            device=where.device,
        )
        order = torch.randperm(blocks, device=where.device)
        self._blocks = order[: batch * per_request].view(batch, per_request)
        self._query, new_keys, new_values = (
            torch.randn((batch, heads, model.head_dim), device=where.device).to(where.dtype)
            for heads in (model.query_heads, model.kv_heads, model.kv_heads)
        )
        self._new = (new_keys, new_values)
        # All blocks are in use, and not every last one is full.
        short = torch.arange(batch, device=where.device) % model.tokens_per_block
        self._lengths = (tokens - short).int()

    def _table(self, cache: Cache) -> torch.Tensor:
        return cache.ids[self._blocks].int()

    def _store(self, cache: Cache, table: torch.Tensor) -> bool:
        """K and V of each request's last token, by the kernel; whether they are where they belong.

        Into both caches that are compared: their contents stay the same.
        """
        import torch

        last = self._lengths.long() - 1
        tokens = self._model.tokens_per_block
        ids = table.long().gather(1, (last // tokens)[:, None]).squeeze(1)
        there = []
        for keys, values in cache.layers:
            self._attention.store(*self._new, keys, values, table, self._lengths)
            there += [
                torch.equal(buffer[ids, last % tokens], new)
                for buffer, new in zip((keys, values), self._new, strict=True)
            ]
        return all(there)

    def _answers(self, cache: Cache, table: torch.Tensor) -> list[torch.Tensor]:
        return [
            self._attention.attend(self._query, keys, values, table, self._lengths)
            for keys, values in cache.layers
        ]

    def compare(self, dense: Cache, cache: Cache, rounds: int) -> dict[str, Any]:
        """Milliseconds of dense, this one, and dense again; and whether both answer the same."""
        import torch

        tables = {each.name: self._table(each) for each in (dense, cache)}
        stored = [self._store(each, tables[each.name]) for each in (dense, cache)]
        answers = [self._answers(each, tables[each.name]) for each in (dense, cache)]
        told: dict[str, Any] = {
            "stored": all(stored),
            "same_answer": all(torch.equal(*pair) for pair in zip(*answers, strict=True)),
        }
        if rounds == 0:
            return told
        contestants = {"dense_ms": dense, "ms": cache, "control_ms": dense}
        graphs = {
            name: _graph(partial(self._answers, each, tables[each.name]))
            for name, each in contestants.items()
        }
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        names = list(graphs)
        for turn in range(rounds + WARMING_TURNS):
            first = turn % len(names)  # nobody is always the first one
            for name in names[first:] + names[:first]:
                took_ms = replay_ms(graphs[name])
                if turn >= WARMING_TURNS:
                    samples[name].append(took_ms)
        return told | samples

    def error_beside_torch(self, dense: Cache) -> float:
        """The largest of a request's relative errors in the last layer."""
        import torch

        table, (keys, values) = self._table(dense), dense.layers[-1]
        answer = self._attention.attend(self._query, keys, values, table, self._lengths)
        errors = []
        for request, length in enumerate(self._lengths.tolist()):
            k, v = (
                each[table[request].long()].flatten(0, 1)[:length].transpose(0, 1).float()
                for each in (keys, values)
            )
            right = torch.nn.functional.scaled_dot_product_attention(
                self._query[request, :, None].float()[None], k[None], v[None], enable_gqa=True
            )
            errors.append(relative_error(answer[request], right[0, :, 0]))
        return max(errors)


def _graph(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What has run before, so that nothing is compiled in the capture."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def ratios(data: dict[str, Any], layout: str, what: str = "ms") -> dict[str, float]:
    """By B the median of the quotients, round by round, of this and dense."""
    by_batch = data["by_layout"][layout]["by_batch"]
    return {batch: median_ratio(told[what], told["dense_ms"]) for batch, told in by_batch.items()}


def wrong_answers(data: dict[str, Any]) -> list[str]:
    """What is not as it has to be; empty: all is right."""
    found = [
        f"{layout}, B = {batch}: the answer is not that of the dense cache"
        for layout, told in data["by_layout"].items()
        for batch, each in told["by_batch"].items()
        if not each["same_answer"]
    ]
    found += [
        f"{layout}, B = {batch}: a token was not stored where it belongs"
        for layout, told in data["by_layout"].items()
        for batch, each in told["by_batch"].items()
        if not each["stored"]
    ]
    return found + [
        f"dense, B = {batch}: {error:.3g} of torch's own attention"
        for batch, error in data["error_beside_torch"].items()
        if not error < MOST_ERROR  # also where it is not a number
    ]


def judge(data: dict[str, Any]) -> None:
    """Adds what came of the bar and of the answers."""
    data["bar"] = BAR
    data["wrong_answers"] = wrong_answers(data)
    default = data["default_layout"]
    if "ms" in next(iter(data["by_layout"][default]["by_batch"].values())):
        data["ratio_at_default_page"] = ratios(data, default)
        data["within_bar"] = all(
            ratio <= MOST_RATIO for ratio in data["ratio_at_default_page"].values()
        )


def section(data: dict[str, Any]) -> Section:
    """The table for people."""
    batches = list(data["error_beside_torch"])
    rows = []
    spread: dict[str, list[float]] = {batch: [] for batch in batches}
    for layout, told in data["by_layout"].items():
        cells = []
        for batch in batches:
            each = told["by_batch"][batch]
            if "ms" not in each:
                cells.append("-")
                continue
            ratio = median_ratio(each["ms"], each["dense_ms"])
            cells.append(f"{ratio:.3f} ({number(statistics.median(each['ms']))})")
            spread[batch].append(median_ratio(each["control_ms"], each["dense_ms"]))
        same = all(told["by_batch"][batch]["same_answer"] for batch in batches)
        mark = " (default)" if layout == data["default_layout"] else ""
        highest = f"{told['highest_element'] / 2**31:.2f}"
        rows.append((layout + mark, *cells, "yes" if same else "NO", highest))
    control = [f"{min(each):.3f} .. {max(each):.3f}" if each else "-" for each in spread.values()]
    rows.append(("dense beside itself", *control, "", ""))
    title = f"{TITLE}, by that of a dense cache (ms), {data['tokens']} tokens a request"
    headings = ("layout", *(f"B = {batch}" for batch in batches), "as dense", "element, 2^31")
    notes = [
        f"{data['device']}; {data['model']}; pages over {data['range_bytes'] // GIB} GiB",
        "beside torch's own attention: at most "
        f"{max(data['error_beside_torch'].values()):.2g} of the answer",
    ]
    if "within_bar" in data:
        notes.append(f"bar: {BAR}: {'met' if data['within_bar'] else 'not met'}")
    if data["left_out"]:
        notes.append(f"no room on this GPU for B = {data['left_out']}")
    return Section(title, headings, rows, [*notes, *data["wrong_answers"]])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.kernels.attention", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="keep every sample in this file")
    parser.add_argument("--quick", action="store_true", help="short contexts, few rounds")
    parser.add_argument(
        "--interpret", action="store_true", help="only the answers, by Triton's interpreter"
    )
    given = parser.parse_args()
    try:
        where = runtime.interpreted() if given.interpret else runtime.compiled()
        work = INTERPRETED if given.interpret else QUICK if given.quick else FULL
        data = harness.facts() | measure(where, work)
    except NeedsGpuError as reason:
        print(f"needs a GPU: {reason}")
        return NEEDS_GPU
    judge(data)
    print(section(data).text())
    if given.json:
        given.json.write_text(json.dumps(harness.shortened(data), indent=1) + "\n")
    return 1 if data["wrong_answers"] else 0


if __name__ == "__main__":
    sys.exit(main())
