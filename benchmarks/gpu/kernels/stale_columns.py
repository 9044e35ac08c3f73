"""What a kernel meets behind a request's last block: ids of a longer row that was there before it.

    python -m benchmarks.gpu.kernels.stale_columns              needs a GPU (exit status 77 without)
    python -m benchmarks.gpu.kernels.stale_columns --interpret  on any processor
    python -m benchmarks.gpu.kernels.stale_columns \\
        --under "compute-sanitizer --error-exitcode 86 --report-api-errors no"

The pages of those blocks are unmapped. Three cases, each in a process of its own:

masked       a kernel that reads no column behind a request's last block: right, and clean
read-ahead   that one first, then one that reads whole tiles, and drops what is too much: it faults
guarded      the same two with KVELASTIC_GUARD_PAGES: it reads scratch, and is right
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import harness
from benchmarks.gpu.kernels import runtime
from benchmarks.gpu.kernels.paged_attention import TILE, PagedAttention
from benchmarks.gpu.kernels.runtime import NEEDS_GPU, NeedsGpuError, Runtime
from benchmarks.vmm.models import BF16_BYTES, Model

if TYPE_CHECKING:
    import torch

MASKED: Final = "masked"
READ_AHEAD: Final = "read-ahead"
GUARDED: Final = "guarded"
CASES: Final = (MASKED, READ_AHEAD, GUARDED)
FAULTED: Final = 86
"""Exit status of a case whose kernel the GPU has ended; --under's own may be the same."""
WRONG: Final = 1
GUARD_PAGES: Final = "KVELASTIC_GUARD_PAGES"
CASE_S: Final = 200
MODEL: Final = Model("tiny", layers=2, query_heads=8, kv_heads=2, head_dim=64)
LENGTHS: Final = (20, 33, 64, 1)
PAGES: Final = 8
PAGE_WITH_BLOCKS: Final = 1
PAGE_OF_STALE_IDS: Final = 5


def run_case(where: Runtime, case: str) -> int:
    """In this process; what the kernel runs into ends it, or is raised by torch."""
    import torch

    from kvelastic.config import load
    from kvelastic.device.selection import reserve_range
    from kvelastic.pool import tensors
    from kvelastic.pool.pool import native_geometry
    from kvelastic.pool.tensor_views import block_view

    layout = MODEL.paged()
    guard = load().guard_pages
    memory = reserve_range(where.open_driver(), native_geometry(layout, PAGES), guard_pages=guard)
    memory.map([0, PAGE_WITH_BLOCKS])
    flat = tensors.whole_range(memory)
    keys, values = (
        tensors.view_of(
            flat, block_view(layout, PAGES, buffer, MODEL.block_shape, BF16_BYTES), where.dtype
        )
        for buffer in (0, 1)
    )
    columns = 2 * TILE // MODEL.tokens_per_block
    blocks = [-(-length // MODEL.tokens_per_block) for length in LENGTHS]
    own = iter(layout.ids(PAGE_WITH_BLOCKS))
    stale = list(layout.ids(PAGE_OF_STALE_IDS))[:columns]
    rows = [[*(next(own) for _ in range(count)), *stale][:columns] for count in blocks]
    torch.manual_seed(5)
    dense = _filled(keys, values, [row[:count] for row, count in zip(rows, blocks, strict=True)])
    query = torch.randn((len(LENGTHS), MODEL.query_heads, MODEL.head_dim)).to(
        device=where.device, dtype=where.dtype
    )
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=where.device)

    def answer(
        cache: tuple[torch.Tensor, torch.Tensor], table: list[list[int]], *, read_ahead: bool
    ) -> torch.Tensor:
        attention = PagedAttention(
            requests=len(LENGTHS), model=MODEL, splits=1, device=where.device, read_ahead=read_ahead
        )
        ids = torch.tensor(table, dtype=torch.int32, device=where.device)
        return attention.attend(query, *cache, ids, lengths)

    dense_rows, first = [], 0
    for count in blocks:
        dense_rows.append([*range(first, first + count), *[0] * (columns - count)])
        first += count
    wanted = answer(dense, dense_rows, read_ahead=False)
    where.synchronize()
    print(f"{case}: stale ids {stale[0]}.. of page {PAGE_OF_STALE_IDS}, not mapped", flush=True)
    for read_ahead in (False,) if case == MASKED else (False, True):
        kernel = READ_AHEAD if read_ahead else MASKED
        found = answer((keys, values), rows, read_ahead=read_ahead)
        where.synchronize()
        if not torch.equal(found, wanted):
            print(f"{case}: {kernel}: the answer is not that of a dense cache", flush=True)
            return WRONG
        print(f"{case}: {kernel}: the answer is that of a dense cache", flush=True)
    return 0


def _filled(
    keys: torch.Tensor, values: torch.Tensor, ids: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random contents in these blocks, and the same in a dense cache, in their order."""
    import torch

    flat = torch.tensor([block for row in ids for block in row], device=keys.device)
    dense = []
    for buffer in (keys, values):
        contents = torch.randn((len(flat), *MODEL.block_shape)).to(buffer)
        buffer[flat] = contents
        dense.append(contents)
    return dense[0], dense[1]


def _case(where: Runtime, case: str) -> int:
    """`run_case`, with a status for a GPU's fault: the context is lost then, nothing ends well."""
    try:
        return run_case(where, case)
    except RuntimeError as fault:
        if not where.is_gpu or "CUDA error" not in str(fault):
            raise
        print(f"{case}: {str(fault).splitlines()[0]}", flush=True)
        os._exit(FAULTED)


def start_case(case: str, *, interpret: bool, under: str) -> dict[str, Any]:
    """One case in a child process: how it ended, what it said, and if that is as it should be."""
    environment = os.environ | {GUARD_PAGES: "true" if case == GUARDED else "false"}
    command = [*shlex.split(under), sys.executable, "-m", __spec__.name, "--case", case]
    done = subprocess.run(
        [*command, *(["--interpret"] if interpret else [])],
        check=False,
        env=environment,
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=CASE_S,
    )
    return {
        "status": done.returncode,
        "as_it_should": ended_as_it_should(case, done.returncode, done.stdout),
        "output": done.stdout[-4000:],
    }


def ended_as_it_should(case: str, status: int, output: str) -> bool:
    """A fault is the GPU's own, the sanitizer's report, or the processor's signal."""
    if case != READ_AHEAD:
        return status == 0
    said = ("illegal memory access", "Invalid __global__ read", "unspecified launch failure")
    return status == -signal.SIGSEGV or (status != 0 and any(each in output for each in said))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.kernels.stale_columns", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="keep what was found in this file")
    parser.add_argument(
        "--interpret", action="store_true", help="by Triton's interpreter, on the processor"
    )
    parser.add_argument("--under", default="", help="a command that runs each case")
    parser.add_argument("--case", choices=CASES, help="only this one, in this process")
    given = parser.parse_args()
    try:
        where = runtime.interpreted() if given.interpret else runtime.compiled()
        if given.case:
            return _case(where, given.case)
    except NeedsGpuError as reason:
        print(f"needs a GPU: {reason}")
        return NEEDS_GPU
    told = harness.facts() | {"device": where.name, "under": given.under, "cases": {}}
    for case in CASES:
        found = start_case(case, interpret=given.interpret, under=given.under)
        told["cases"][case] = found
        mark = "as it should" if found["as_it_should"] else "NOT as it should"
        print(f"{case:<11} ended with status {found['status']}: {mark}", flush=True)
        if not found["as_it_should"]:
            print(found["output"])
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if all(each["as_it_should"] for each in told["cases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
