"""Clients of a server of FlexKV's, as processes of their own: `flexkv_clients.py tp|dp JSON`.

Both have the ranks' memory, by descriptors that they inherit: `tp` registers one rank's, `dp` moves
blocks between all ranks of its group and the tiers, and knows what has to lie in them. Lines on
standard output say what has happened; `dp` takes as many steps as each line of its input says.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np

from kvelastic.errors import KvelasticError
from kvelastic.flexkv.common.config import ModelConfig
from kvelastic.flexkv.common.memory_handle import TensorDescription, TensorSharedHandle
from kvelastic.flexkv.common.request import KVResponseStatus
from kvelastic.flexkv.server.client import KVDPClient, KVTPClient

LAYERS, BLOCKS, TOKENS, HEADS, SIZE = 2, 24, 4, 4, 8
RANKS = 2
ROW = 2 * LAYERS * TOKENS * (HEADS // RANKS) * SIZE
PROMPTS = 12
MODEL: dict[str, Any] = {
    "num_layers": LAYERS,
    "num_kv_heads": HEADS,
    "head_size": SIZE,
    "dtype": "float16",
    "tp_size": RANKS,
    "dp_size": 2,
}


def cache_shape() -> tuple[int, ...]:
    """One rank's: layers, K and V, blocks, tokens, heads, size."""
    return (LAYERS, 2, BLOCKS, TOKENS, HEADS // RANKS, SIZE)


def array_of(fd: int) -> np.ndarray[Any, Any]:
    shape = cache_shape()
    strides = np.empty(shape, "float16").strides
    whole = TensorDescription(0, shape, strides, "float16", 2)
    return TensorSharedHandle.of(whole, fd).get_tensor()


def contents(prompt: int, block: int, rank: int) -> np.ndarray[Any, Any]:
    """What lies in a block of a prompt, in one rank; the same in every process."""
    return np.random.default_rng((prompt, block, rank)).random(ROW).astype("float16")


def tokens_of(prompt: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(prompt).integers(0, 50_000, TOKENS * (1 + prompt % 4))


def blocks_view(array: np.ndarray[Any, Any], block: int) -> np.ndarray[Any, Any]:
    return array[:, :, block]


class Engine:
    """A data-parallel engine that puts and gets, and checks what it gets."""

    def __init__(self, port: str, dp_client_id: int, fds: list[int], seed: int) -> None:
        self.ranks = [array_of(fd) for fd in fds]
        self.client = KVDPClient(port, ModelConfig(**MODEL), dp_client_id)
        self.pick = random.Random(seed)
        self.client.start_server_and_register()

    def put(self, prompt: int) -> str:
        count = len(tokens_of(prompt)) // TOKENS
        ids = self.pick.sample(range(BLOCKS), count)
        for block, block_id in enumerate(ids):
            for rank, array in enumerate(self.ranks):
                blocks_view(array, block_id)[...] = contents(prompt, block, rank).reshape(
                    blocks_view(array, 0).shape
                )
        task_id, mask = self.client.put_match(tokens_of(prompt))
        first = count - int(mask.sum()) // TOKENS
        return self._finish(task_id, ids[first:], "put")[0]

    def get(self, prompt: int) -> str:
        task_id, mask = self.client.get_match(tokens_of(prompt))
        count = int(mask.sum()) // TOKENS
        ids = self.pick.sample(range(BLOCKS), count)
        for block_id in ids:
            for array in self.ranks:
                blocks_view(array, block_id)[...] = 0
        outcome, status = self._finish(task_id, ids, "get")
        if status is KVResponseStatus.SUCCESS:
            for block, block_id in enumerate(ids):
                for rank, array in enumerate(self.ranks):
                    seen = blocks_view(array, block_id).reshape(-1)
                    if not (seen == contents(prompt, block, rank)).all():
                        return "WRONG"
        return outcome

    def _finish(self, task_id: int, ids: list[int], kind: str) -> tuple[str, KVResponseStatus]:
        if not ids:
            self.client.cancel_tasks([task_id])
            return f"{kind}-nothing", KVResponseStatus.CANCELLED
        slots = np.concatenate([np.arange(TOKENS) + block_id * TOKENS for block_id in ids])
        self.client.launch_tasks([task_id], [slots])
        response = self.client.wait([task_id], 300, completely=self.pick.random() < 0.5)[task_id]
        return f"{kind}-{response.status.value}", response.status

    def step(self) -> str:
        prompt = self.pick.randrange(PROMPTS)
        try:
            if self.pick.random() < 0.1:  # and never thinks of it again
                self.client.get_match(tokens_of(prompt))
                self.client.put_match(tokens_of(prompt))
                return "left"
            return self.put(prompt) if self.pick.random() < 0.4 else self.get(prompt)
        except KvelasticError as error:
            return f"error {error.code}"


def main(role: str, given: str) -> None:
    facts = json.loads(given)
    if role == "tp":
        client = KVTPClient(facts["port"], facts["dp"], tp_rank=facts["rank"])
        client.register_to_server(list(array_of(facts["fd"])), block_axis=1)
        client.wait_until_registered()
        print("registered", flush=True)
        sys.stdin.read()
        return
    engine = Engine(facts["port"], facts["dp"], facts["fds"], facts["seed"])
    print("registered", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            print(engine.step(), flush=True)
    engine.client.unregister()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
