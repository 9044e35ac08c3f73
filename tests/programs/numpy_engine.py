"""An engine of NumPy that serves prompts, and keeps its KV by FlexKV's interface: a test runs it.

    numpy_engine.py FOLDER ROUND     # answers of ten prompts, and how many tokens were not computed

One layer of attention with random weights: enough that a wrong byte of KV is another answer.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.memory_handle import shared_zeros
from kvelastic.flexkv.common.request import KVResponseStatus
from kvelastic.flexkv.kvmanager import KVManager
from kvelastic.flexkv.server.client import KVTPClient

VOCABULARY, HEADS, SIZE, TOKENS, BLOCKS = 64, 2, 16, 8, 16
WIDTH = HEADS * SIZE
Array = np.ndarray[Any, Any]


class Weights:
    """The model: embeddings, three projections, and the way back to tokens."""

    def __init__(self) -> None:
        pick = np.random.default_rng(7)
        self.embedding = pick.normal(size=(VOCABULARY, WIDTH)).astype("float32")
        self.query, self.key, self.value = pick.normal(size=(3, WIDTH, WIDTH)).astype("float32")


class Engine:
    """One request at a time, over blocks of a paged KV cache."""

    def __init__(self, folder: str, port: str) -> None:
        self.weights = Weights()
        # K and V, blocks, tokens, heads, size: one layer, in memory that can be handed over.
        self.kv = shared_zeros((2, BLOCKS, TOKENS, HEADS, SIZE), "float32")
        model = ModelConfig(
            num_layers=1,
            num_kv_heads=HEADS,
            head_size=SIZE,
            dtype="float32",
            model="numpy",
            weights="seed 7",
        )
        cache = CacheConfig(
            tokens_per_block=TOKENS,
            num_cpu_blocks=BLOCKS,
            enable_ssd=True,
            num_ssd_blocks=256,
            ssd_cache_dir=folder,
        )
        self.manager = KVManager(model, cache, gpu_register_port=port)
        self.manager.start()
        self.rank = KVTPClient(port)
        self.rank.register_to_server([self.kv], block_axis=1)
        self.rank.wait_until_registered()
        self.computed = 0

    def answer(self, prompt: Array, length: int = 8) -> list[int]:
        """The tokens after a prompt: what is found is loaded, what is not is computed."""
        slots = np.arange(BLOCKS * TOKENS)  # all blocks are this request's, in order
        found = self._load(prompt, slots)
        tokens = list(prompt)
        for at in range(found, len(prompt) - 1):
            self._write(at, tokens[at])
        for at in range(len(prompt) - 1, len(prompt) - 1 + length):
            self._write(at, tokens[at])
            tokens.append(self._next(at, tokens[at]))
        self._store(np.asarray(tokens[:-1]), slots)
        return [int(token) for token in tokens[len(prompt) :]]

    def _load(self, prompt: Array, slots: Array) -> int:
        task, mask = self.manager.get_match(prompt[:-1])
        found = int(mask.sum())
        if found == 0:
            self.manager.cancel(task)
            return 0
        self.manager.launch(task, slots[:found])
        loaded = self.manager.wait(task)[task].status is KVResponseStatus.SUCCESS
        return found if loaded else 0

    def _store(self, tokens: Array, slots: Array) -> None:
        task, mask = self.manager.put_match(tokens)
        if mask.any():
            self.manager.launch(task, slots[: mask.size][mask])
            self.manager.wait(task, completely=True)
        else:
            self.manager.cancel(task)

    def _write(self, at: int, token: int) -> None:
        row = self.weights.embedding[token]
        for kind, weight in enumerate((self.weights.key, self.weights.value)):
            self.kv[kind, at // TOKENS, at % TOKENS] = (row @ weight).reshape(HEADS, SIZE)
        self.computed += 1

    def _next(self, at: int, token: int) -> int:
        keys, values = self.kv.reshape(2, BLOCKS * TOKENS, HEADS, SIZE)[:, : at + 1]
        query = (self.weights.embedding[token] @ self.weights.query).reshape(HEADS, SIZE)
        scores = np.einsum("thd,hd->th", keys, query) / SIZE
        shares = np.exp(scores - scores.max(0))
        mixed = np.einsum("th,thd->hd", shares / shares.sum(0), values).reshape(WIDTH)
        return int(np.argmax(self.weights.embedding @ mixed))

    def close(self) -> None:
        """End the rank and the manager; what lies on the disk stays there."""
        self.rank.close()
        self.manager.shutdown()


def main(folder: str, port: str) -> None:
    pick = np.random.default_rng(3)
    prompts = [pick.integers(0, VOCABULARY, int(count)) for count in pick.integers(30, 90, 10)]
    engine = Engine(folder, port)
    answers = [engine.answer(prompt) for prompt in prompts]
    print(engine.computed, answers)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
