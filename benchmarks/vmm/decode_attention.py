"""Part 6b, GPU only: one decode step's attention over blocks in each layout, against a dense cache.

This decides the default page size: a page should be as small as attention allows. A step goes
through all layers of Llama-3-8B for B requests of 1024 tokens, whose blocks lie anywhere in it:

gather     K and V of the requests' blocks are read by their ids; this is where a layout shows
attention  gather, then torch's scaled_dot_product_attention on what was gathered
flash      vLLM's kernel, which reads blocks by their ids itself; only with a vLLM for CUDA

The step is replayed as a CUDA graph: at B = 1 launching its kernels would take longer than they do.
Each layout takes turns with the dense cache (same kernels, same block ids, same contents), and only
the two of them are in memory. That both answer the same is checked.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.vmm import cache_layouts, driver_kinds, paged_kernel
from benchmarks.vmm.cache_layouts import Cache
from benchmarks.vmm.models import GIB, LLAMA_3_8B, MIB, Model
from benchmarks.vmm.section import Section, median_ratio, number

if TYPE_CHECKING:
    import torch

TITLE = "Decode attention over blocks"
PAGES_MIB = (2, 4, 8, 16, 32, 64, 128)
FULL: dict[str, Any] = {"batches": (1, 4, 8, 16, 32, 64), "tokens": 1024, "rounds": 20}
QUICK: dict[str, Any] = {"batches": (1, 4), "tokens": 256, "rounds": 3}
WORKSPACE_BYTES = 3 * GIB


def measure(kind: str, *, batches: list[int], tokens: int, rounds: int) -> dict[str, Any]:
    """`ms[layout][B]`: what each of gather and attention took, beside dense in the same round."""
    import torch

    if not torch.cuda.is_available():
        return {"skipped": f"torch {torch.__version__} finds no CUDA device"}
    model = LLAMA_3_8B
    per_request = tokens // model.tokens_per_block
    left_bytes = torch.cuda.mem_get_info()[0] - WORKSPACE_BYTES
    fitting = [b for b in batches if 2 * b * per_request * model.block_all_bytes <= left_bytes]
    if not fitting:
        return {"skipped": f"{left_bytes // MIB} MiB are too few for two caches of one request"}
    blocks = max(fitting) * per_request
    driver = driver_kinds.open_seam(kind)
    dense = cache_layouts.dense(model, blocks, "cuda")
    order = torch.randperm(blocks, device=dense.ids.device)
    ms: dict[str, Any] = {}
    for make in _makers(model, driver, blocks):
        cache = make()
        cache.fill_as(dense)
        ms[cache.name] = {
            str(batch): _compare(model, dense, cache, order, batch, per_request, rounds)
            for batch in fitting
        }
        del cache
        gc.collect()  # the pages go back before the next layout wants them
    return {
        "ms": ms,
        "tokens": tokens,
        "left_out": [batch for batch in batches if batch not in fitting],
        "no_flash": paged_kernel.missing(),
    }


def _makers(model: Model, driver: Any, blocks: int) -> list[Callable[[], Cache]]:
    def paged(page_mib: int) -> Callable[[], Cache]:
        return lambda: cache_layouts.paged(model, driver, blocks, page_mib * MIB)

    return [
        *(paged(page_mib) for page_mib in PAGES_MIB),
        lambda: cache_layouts.per_block(model, driver, blocks),
        lambda: cache_layouts.per_layer(model, driver, blocks),
    ]


def step(model: Model, cache: Cache, query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The last layer's attention for query (B, query heads, 1, dim); all layers are computed."""
    import torch

    answer = query
    for keys, values in cache.layers:
        # (B, blocks, tokens, heads, dim) -> (B, heads, tokens of the request, dim)
        k, v = (buffer[table].flatten(1, 2).transpose(1, 2) for buffer in (keys, values))
        answer = torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=True)
    return answer


def _compare(
    model: Model,
    dense: Cache,
    cache: Cache,
    order: torch.Tensor,
    batch: int,
    per_request: int,
    rounds: int,
) -> dict[str, Any]:
    import torch

    blocks = order[: batch * per_request].view(batch, per_request)
    query = torch.randn(
        (batch, model.query_heads, 1, model.head_dim), dtype=torch.bfloat16, device=order.device
    )
    tables = {each.name: each.ids[blocks] for each in (dense, cache)}
    works: dict[str, Callable[[Cache], object]] = {
        "attention": lambda each: step(model, each, query, tables[each.name]),
        "gather": lambda each: _gather_only(each, tables[each.name]),
    }
    if not paged_kernel.missing():
        works["flash"] = lambda each: _flash_step(each, query, tables[each.name])
    told: dict[str, Any] = {}
    for what, work in works.items():
        answers = [work(each) for each in (dense, cache)]
        same = None if answers[0] is None else bool(torch.equal(*answers))
        del answers
        graphs = [_graph(partial(work, each)) for each in (dense, cache)]
        samples: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 3):
            took = [replay_ms(graph) for graph in graphs]
            if turn >= 3:
                for place, took_ms in zip(samples, took, strict=True):
                    place.append(took_ms)
        told[what] = {"dense_ms": samples[0], "ms": samples[1], "same_answer": same}
        del graphs
    torch.cuda.empty_cache()
    return told


def _gather_only(cache: Cache, table: torch.Tensor) -> None:
    """As the step reads, layer by layer: what one has read is dropped before the next."""
    for keys, values in cache.layers:
        _ = keys[table], values[table]


def _flash_step(cache: Cache, query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    for keys, values in cache.layers:
        answer = paged_kernel.attend(query, keys, values, table)
    return answer


def _graph(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    import torch

    # Once outside: libraries make their workspaces at first use, which a capture refuses.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one replay, on the device."""
    import torch

    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


def measured(data: dict[str, Any]) -> list[str]:
    """Which of attention, gather and flash there are figures of."""
    by_batch = next(iter(data["ms"].values()))
    return list(next(iter(by_batch.values())))


def ratios(data: dict[str, Any], what: str) -> dict[str, list[tuple[int, float]]]:
    """By layout `(B, time by that of the dense cache)`."""
    return {
        layout: [
            (int(batch), median_ratio(told[what]["ms"], told[what]["dense_ms"]))
            for batch, told in by_batch.items()
        ]
        for layout, by_batch in data["ms"].items()
    }


def sections(data: dict[str, Any], kind: driver_kinds.DriverKind) -> list[Section]:
    told = []
    batches = [int(batch) for batch in next(iter(data["ms"].values()))]
    for what in measured(data):
        rows = []
        for layout, by_ratio in ratios(data, what).items():
            cells = []
            for batch, ratio in by_ratio:
                ms = statistics.median(data["ms"][layout][str(batch)][what]["ms"])
                cells.append(f"{ratio:.2f} ({number(ms)})")
            same = {each[what]["same_answer"] for each in data["ms"][layout].values()}
            told_of = {True: "yes", False: "NO", None: "-"}
            rows.append((layout, *cells, " and ".join(sorted(told_of[each] for each in same))))
        headings = ("layout", *(f"B = {batch}" for batch in batches), "answers as dense")
        title = f"{TITLE}: {what}, by that of a dense cache (ms), {data['tokens']} tokens a request"
        told.append(Section(title, headings, rows))
    if data["no_flash"]:
        told[0].notes.append(f"flash was not measured: {data['no_flash']}.")
    if data["left_out"]:
        told[0].notes.append(f"No room on this GPU for B = {data['left_out']}.")
    return told
