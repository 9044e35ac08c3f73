"""FlexKV's workers over a GPU's memory: put, evict, get, by `flexkv_on_a_gpu.py FOLDER`.

The GPU is `libcuda.so.1` of whoever runs this; the bytes are written and read by its own copies.
"""

from __future__ import annotations

import ctypes
import os
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gpu_kernels import SUCCESS, Gpu
from waiting import DEADLINE_S

from kvelastic import _vmm
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.request import KVResponseStatus
from kvelastic.flexkv.common.storage import KVCacheLayout, KVCacheLayoutType
from kvelastic.flexkv.common.transfer import DeviceType
from kvelastic.flexkv.kvmanager import KVManager
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import native_geometry

BLOCKS, TOKENS, LAYERS = 32, 4, 3


class OnTheGpu:
    """As much of a torch tensor of float32 over a range as a registration reads."""

    dtype, device = "float32", "cuda"

    def __init__(self, memory: _vmm.Range, shape: tuple[int, ...]) -> None:
        self.memory, self.shape = memory, shape

    def data_ptr(self) -> int:
        return self.memory.address

    def element_size(self) -> int:
        return 4

    def stride(self) -> list[int]:
        return [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]


def main(folder: Path) -> None:
    gpu = Gpu()
    layout = KVCacheLayout(KVCacheLayoutType.LAYERFIRST, LAYERS, BLOCKS, TOKENS, 2, 8, 2, 4)
    page = PageLayout.solve(64 << 10, 1, page_size_bytes=2 << 20)
    memory = _vmm.Range.reserve(gpu.driver, native_geometry(page, 1))
    memory.map([0])
    model = ModelConfig(num_layers=LAYERS, num_kv_heads=2, head_size=8, dtype="float32")
    remote = folder / "shared"
    tiers: list[dict[str, Any]] = [
        {"enable_ssd": True, "ssd_cache_dir": str(folder / "kv")},
        {"enable_remote": True, "remote_cache_path": str(remote)},
    ]
    for more in tiers:
        cache = CacheConfig(tokens_per_block=TOKENS, num_cpu_blocks=64, num_ssd_blocks=64, **more)
        with KVManager(model, cache) as manager:
            manager.task_engine.cache_engine._lookup._patience_s = DEADLINE_S
            manager.register_kv_caches([OnTheGpu(memory, layout.kv_shape)], layout)
            there = np.random.default_rng(1).integers(0, 255, layout.total_bytes, np.uint8)
            copy(gpu, "cuMemcpyHtoD_v2", memory.address, there)
            tokens = np.arange(20 * TOKENS, dtype=np.int64)
            slots = np.arange(20 * TOKENS, dtype=np.int64)
            task = manager.put_async(tokens, slots)
            done = manager.wait(task, DEADLINE_S, completely=True)[task]
            assert done.status is KVResponseStatus.SUCCESS, done
            copy(gpu, "cuMemcpyHtoD_v2", memory.address, np.zeros_like(there))
            manager.task_engine.cache_engine.engine(DeviceType.CPU).evict(15)
            if "enable_remote" in more:
                task = manager.prefetch_async(tokens)
                assert manager.wait(task, DEADLINE_S)[task].status is KVResponseStatus.SUCCESS
            task = manager.get_async(tokens, slots)
            done = manager.wait(task, DEADLINE_S)[task]
            assert done.status is KVResponseStatus.SUCCESS, done
            assert done.return_mask is not None
            assert done.return_mask.all()
            back = np.empty_like(there)
            copy(gpu, "cuMemcpyDtoH_v2", memory.address, back)
            shaped = (LAYERS, 2, BLOCKS, layout.row_bytes)
            wanted, got = there.reshape(shaped), back.reshape(shaped)
            assert (got[:, :, :20] == wanted[:, :, :20]).all()
            assert not got[:, :, 20:].any()
            manager.task_engine.transfer_engine.drain(DEADLINE_S)
            manager.check_integrity()
            manager.task_engine.forget_client(0)
            manager.task_engine.transfer_engine.gpu_worker.unregister(0)
    print("moved")


def copy(gpu: Gpu, call: str, address: int, host: np.ndarray[Any, Any]) -> None:
    """By the driver's own call: to the GPU or from it."""
    device = ctypes.c_uint64(address)
    pointer = host.ctypes.data_as(ctypes.c_void_p)
    count = ctypes.c_size_t(host.nbytes)
    arguments = (device, pointer, count) if "HtoD" in call else (pointer, device, count)
    assert getattr(gpu.sim, call)(*arguments) == SUCCESS


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
