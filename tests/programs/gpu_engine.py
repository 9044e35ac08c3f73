"""One process with vLLM's GPU worker on a simulated GPU: `gpu_engine.py MODEL REQUESTS RESULTS`.

Generates the requests, again while limits change, and again after sleep and wake; then a kernel is
held on the worker's stream while its memory is to be given back. Writes what happened as JSON.
Without requests it only starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from itertools import cycle
from pathlib import Path
from typing import Any

import gpu_worker_on_cpu as worker
from vllm import LLM, SamplingParams
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm_server import BLOCK_TOKENS, MAX_MODEL_TOKENS

from kvelastic.shared import segment

NAME = os.environ["KVELASTIC_IPC_NAME"]
READ_BYTES = 4096


def used_bytes() -> int:
    free, total = worker.simulated_memory()
    return total - free


def generate(engine: Any, requests: list[Any]) -> list[list[int]]:
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests],
        use_tqdm=False,
    )
    return [list(one.outputs[0].token_ids) for one in outputs]


def count_stale_ids(found: dict[str, Any]) -> None:
    """Look at every block table that kernels get: what stands behind a row's own ids."""
    found["stale_ids"] = found["rows"] = 0
    gather, commit = BlockTables.gather_block_tables, BlockTable.commit_block_table

    def seen(row: Any, ids: int) -> None:
        found["rows"] += 1
        found["stale_ids"] += int((row[ids:] != 0).sum())

    def gather_and_look(tables: Any, mapping: Any, *arguments: Any, **named: Any) -> Any:
        gathered = gather(tables, mapping, *arguments, **named)
        for group, table in enumerate(gathered):
            for row, request in enumerate(mapping.tolist()):
                seen(table[row], int(tables.num_blocks.np[group, request]))
        return gathered

    def commit_and_look(table: Any, rows: int) -> None:
        commit(table, rows)
        for row in range(rows):
            seen(table.get_device_tensor(rows)[row], int(table.num_blocks_per_row[row]))

    BlockTables.gather_block_tables, BlockTable.commit_block_table = (
        gather_and_look,
        commit_and_look,
    )


def generate_under_limits(engine: Any, requests: list[Any], found: dict[str, Any]) -> Any:
    """Limits go up and down all the time; where one was applied, what the device then held."""
    page_bytes = segment.inspect(NAME).usage["page_bytes"]
    found["limits_applied"], found["over_the_limit"] = 0, []
    done = threading.Event()

    def change() -> None:
        for pages in cycle((2, 6, 1, 8)):
            if done.is_set():
                return
            answer = segment.request(NAME, limit_bytes=pages * page_bytes, wait_s=5)
            held_pages = used_bytes() // page_bytes
            if answer.state == "applied":
                found["limits_applied"] += 1
                if held_pages > pages:
                    found["over_the_limit"].append([pages, held_pages])

    thread = threading.Thread(target=change)
    thread.start()
    tokens = generate(engine, requests)
    done.set()
    thread.join()
    segment.request(NAME, limit_bytes=1 << 40, wait_s=300)
    return tokens


def hold_a_kernel(engine: Any, found: dict[str, Any]) -> None:
    """A kernel reads the cache on the worker's stream while all memory is asked back."""
    driver_worker = engine.llm_engine.model_executor.driver_worker.worker
    address = ctypes.c_uint64(driver_worker.model_runner.kv_caches[0].data_ptr())
    cuda, stream, context = worker.CUDA, ctypes.c_void_p(worker.stream), ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    before = used_bytes()
    assert cuda.kvsim_hold_stream(stream) == 0
    assert cuda.kvsim_enqueue_read(stream, address, READ_BYTES) == 0
    found["under_the_kernel"] = segment.request(NAME, asleep=True, wait_s=0.3).state
    found["unmapped_under_the_kernel"] = before - used_bytes()
    assert cuda.kvsim_release_stream(stream) == 0
    found["after_the_kernel"] = segment.request(NAME, asleep=True, wait_s=300).state
    found["used_after_the_kernel"] = used_bytes()
    found["context_error"] = cuda.cuCtxSynchronize()


def main(model: str, requests_file: str, results_file: str) -> None:
    requests = json.loads(Path(requests_file).read_text())
    found: dict[str, Any] = {}
    engine = LLM(
        model,
        dtype="float32",
        max_model_len=MAX_MODEL_TOKENS,
        max_num_seqs=40,  # V2 warms up with that many hand-made ids: beyond the 32 of page 0
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        worker_cls="gpu_worker_on_cpu.GpuWorkerOnCpu",
        distributed_executor_backend="uni",
        gpu_memory_utilization=0.5,
    )
    worker.other_engine_ends()
    inside = engine.llm_engine.model_executor.driver_worker.worker
    found["runner"] = type(inside.model_runner).__module__
    found["num_blocks"] = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks
    if not requests:
        Path(results_file).write_text(json.dumps(found))
        return
    count_stale_ids(found)
    found["tokens"] = generate(engine, requests)
    found["used_bytes"] = used_bytes()
    found["tokens_under_limits"] = generate_under_limits(engine, requests, found)
    engine.sleep(1)
    found["asleep_bytes"] = used_bytes()
    engine.wake_up()
    found["tokens_after_wake"] = generate(engine, requests)
    found["events"] = worker.events
    hold_a_kernel(engine, found)
    Path(results_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
