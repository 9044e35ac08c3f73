"""Offloading to this machine's memory without a GPU, for vLLM's own OffloadingConnector.

vLLM's CPU offloading wants a GPU to copy from. This is the same with its scheduler's side, its
books and its fences, and a thread that copies. Named by `spec_module_path=host_offload` and
`spec_name=HostOffloading`; `job_s` in the connector's extra configuration is how long each job
takes at least, so that jobs are on their way when the tests take memory away.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

JOB_S = 0.3
"""What a job takes unless the configuration says otherwise."""


class HostWorker(OffloadingWorker):
    """Copies blocks between the KV cache and tensors of its own, in the order it is asked."""

    def __init__(
        self, kv_caches: Any, blocks_per_chunk: int, chunks: int, job_s: float = JOB_S
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._job_s = job_s
        # NumPy and not torch copies: torch's copy would start threads for OpenMP of its own.
        self._cache = [
            one.tensor.view(torch.int8).view(-1, one.page_size_bytes).numpy()
            for one in kv_caches.tensors
        ]
        self._host = [
            np.zeros((chunks * blocks_per_chunk, one.page_size_bytes), np.int8)
            for one in kv_caches.tensors
        ]
        self._refs = kv_caches.group_data_refs
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._done: list[TransferResult] = []
        self._thread = threading.Thread(target=self._copy_all, daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, stores=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, dst_spec, src_spec, stores=False)

    def _submit(self, job_id: int, cache: Any, host: Any, *, stores: bool) -> bool:
        with self._changed:
            self._pending.add(job_id)
        self._jobs.put((job_id, cache, host, stores))
        return True

    def _copy_all(self) -> None:
        # vLLM binds its workers to cores; the copies are not to wait for the model's.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        while (job := self._jobs.get()) is not None:
            job_id, cache, host, stores = job
            began_s = time.monotonic()
            time.sleep(self._job_s)
            copied = self._copy(cache, host, stores)
            with self._changed:
                self._pending.discard(job_id)
                took_s = time.monotonic() - began_s
                self._done.append(TransferResult(job_id, True, copied, took_s))
                self._changed.notify_all()

    def _copy(self, cache: Any, host: Any, stores: bool) -> int:
        copied = first_block = first_chunk = 0
        for refs, count, begins_at in zip(
            self._refs, cache.group_sizes, cache.block_indices, strict=True
        ):
            if not count:
                continue
            skipped = begins_at % self._blocks_per_chunk
            chunks = -(-(count + skipped) // self._blocks_per_chunk)
            chunk_ids = host.block_ids[first_chunk : first_chunk + chunks].astype(np.int64)
            slots = chunk_ids[:, None] * self._blocks_per_chunk + np.arange(self._blocks_per_chunk)
            there = slots.ravel()[skipped : skipped + count]
            here = cache.block_ids[first_block : first_block + count].astype(np.int64)
            first_block, first_chunk = first_block + count, first_chunk + chunks
            for ref in refs:
                mine, its = self._cache[ref.tensor_idx], self._host[ref.tensor_idx]
                if stores:
                    its[there] = mine[here]
                else:
                    mine[here] = its[there]
                copied += count * ref.page_size_bytes
        return copied

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._pending & set(job_ids))

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join()


class HostOffloading(CPUOffloadingSpec):
    """vLLM's scheduler side with the worker above."""

    _worker: HostWorker | None

    def get_worker(self, kv_caches: Any) -> HostWorker:
        if not self._worker:
            job_s = float(self.extra_config.get("job_s", JOB_S))
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, job_s)
        return self._worker
