"""An engine of NumPy over a KVManager: blocks whose bytes say whose they are.

What block i of a prompt holds is made of the tokens up to its end, so what comes back is compared
with what the tokens say, and with nothing that was kept aside.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from waiting import DEADLINE_S

from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.storage import KVCacheLayout, KVCacheLayoutType
from kvelastic.flexkv.kvmanager import KVManager
from kvelastic.tiers.base import Store

TOKENS = 4
"""Of a block."""
ENGINE_BLOCKS = 64
MODEL = ModelConfig(num_layers=2, num_kv_heads=2, head_size=4, dtype="float32")
SOON_S = DEADLINE_S


def layout_of(
    model: ModelConfig = MODEL, kind: KVCacheLayoutType = KVCacheLayoutType.LAYERFIRST
) -> KVCacheLayout:
    return KVCacheLayout(
        kind,
        model.num_layers,
        ENGINE_BLOCKS,
        TOKENS,
        model.heads_per_rank,
        model.head_size,
        model.kv_dim,
        4,
    )


def prompt(seed: int, blocks: int, more: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 50_000, blocks * TOKENS + more, np.int64)


def slots_of(blocks: Sequence[int]) -> npt.NDArray[np.int64]:
    """The slots of whole blocks."""
    firsts = np.array(blocks, np.int64) * TOKENS
    return (firsts[:, None] + np.arange(TOKENS)).ravel()


class Engine:
    """A manager, and the tensors that one rank of its engine has."""

    def __init__(
        self,
        manager: KVManager,
        model: ModelConfig = MODEL,
        kind: KVCacheLayoutType = KVCacheLayoutType.LAYERFIRST,
    ) -> None:
        self.manager = manager
        self.layout = layout_of(model, kind)
        self.tensor = np.zeros(self.layout.kv_shape, np.float32)
        self.flat: npt.NDArray[np.uint8] = self.tensor.view(np.uint8).reshape(-1)

    def block(self, block: int) -> bytes:
        """A block's bytes in the order of a record, read by the layout's words and not its code."""
        axis = {"LAYERFIRST": 2, "BLOCKFIRST": 0, "LAYERBLOCK": 1}[self.layout.type.value]
        return np.take(self.tensor, block, axis).tobytes()

    def write(self, block: int, tokens: npt.NDArray[np.int64], at: int) -> None:
        """Compute block `at` of a prompt into a block."""
        axis = {"LAYERFIRST": 2, "BLOCKFIRST": 0, "LAYERBLOCK": 1}[self.layout.type.value]
        row = np.frombuffer(contents(tokens, at, self.layout.block_bytes), np.float32)
        index: list[Any] = [slice(None)] * self.tensor.ndim
        index[axis] = block
        self.tensor[tuple(index)] = row.reshape(self.tensor[tuple(index)].shape)

    def compute(self, tokens: npt.NDArray[np.int64], blocks: Iterable[int], first: int = 0) -> None:
        for at, block in enumerate(blocks, first):
            self.write(block, tokens, at)

    def holds(self, block: int, tokens: npt.NDArray[np.int64], at: int) -> bool:
        return self.block(block) == contents(tokens, at, self.layout.block_bytes)

    def clear(self) -> None:
        self.tensor[:] = 0

    def put(self, tokens: npt.NDArray[np.int64], *, completely: bool = True) -> int:
        """Compute a prompt and put what is not there; answers how many blocks were put."""
        task, mask = self.manager.put_match(tokens)
        first, count = int(mask.argmax()) // TOKENS, int(mask.sum()) // TOKENS
        self.compute(tokens, range(count), first)
        self.manager.launch(task, slots_of(range(count)))
        answer = self.manager.wait(task, SOON_S, completely)[task]
        assert answer.status.value == "success", answer
        return count

    def get(self, tokens: npt.NDArray[np.int64]) -> int:
        """Load a prompt into cleared blocks and compare; answers how many blocks came."""
        self.clear()
        task, mask = self.manager.get_match(tokens)
        count = int(mask.sum()) // TOKENS
        self.manager.launch(task, slots_of(range(count)))
        answer = self.manager.wait(task, SOON_S)[task]
        assert answer.status.value == "success", answer
        for at in range(count):
            assert self.holds(at, tokens, at), f"block {at} has wrong bytes"
        return count


def contents(tokens: npt.NDArray[np.int64], at: int, size_bytes: int) -> bytes:
    """What block `at` of a prompt holds."""
    seed = zlib.crc32(tokens[: (at + 1) * TOKENS].tobytes())
    return np.random.default_rng(seed).integers(1, 1 << 20, size_bytes // 4).astype("f4").tobytes()


def cache_config(folder: Path | None = None, **more: Any) -> CacheConfig:
    """A CPU tier, and disks where a folder is given."""
    named = {"num_cpu_blocks": 64, "num_ssd_blocks": 512, **more}
    if folder is not None:
        named |= {"enable_ssd": True, "ssd_cache_dir": str(folder / "kv")}
    return CacheConfig(tokens_per_block=TOKENS, **named)


@contextmanager
def running(
    cache: CacheConfig | None = None,
    model: ModelConfig = MODEL,
    kind: KVCacheLayoutType = KVCacheLayoutType.LAYERFIRST,
) -> Iterator[Engine]:
    """An engine whose manager has nothing left open and is whole when the test ends."""
    manager = KVManager(model, cache or cache_config())
    with manager:
        engine = Engine(manager, model, kind)
        manager.register_kv_caches([engine.tensor], engine.layout)
        yield engine
        tasks = manager.task_engine
        assert tasks.transfer_engine.drain(SOON_S)
        manager.check_integrity()


def wait_for_media(manager: KVManager) -> None:
    """Let a shared folder take its time to say what it has: on a loaded machine 20 ms are short."""
    manager.task_engine.cache_engine._lookup._patience_s = SOON_S


def stores(engine: Engine) -> list[Store]:
    return list(engine.manager.task_engine.storage.stores.values())
