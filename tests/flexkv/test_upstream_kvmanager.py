"""FlexKV's own test of its KVManager (`test_kvmanager` of v1.2.1), written anew for host memory.

Thirty cases: five models, two sets of tiers, three ways in which an engine lays out its tensors.
Each rank registers at the manager's own endpoint, one block more than the rank before.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from waiting import DEADLINE_S

from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.memory_handle import shared_zeros
from kvelastic.flexkv.common.request import KVResponseStatus
from kvelastic.flexkv.common.storage import KVCacheLayout, KVCacheLayoutType
from kvelastic.flexkv.kvmanager import KVManager
from kvelastic.flexkv.server.client import KVTPClient

LAYERS, HEADS, HEAD_SIZE, TOKENS = 4, 4, 8, 16
BLOCKS: Final = 512
PER_REQUEST: Final = 16
REQUESTS: Final = BLOCKS // PER_REQUEST
WRITTEN_FIRST: Final = int(REQUESTS * 0.4)

PER_LAYER, ALL_IN_ONE, K_AND_V_APART = range(3)
"""One tensor for each layer; one for all; each layer's K in one and its V in another one."""

Tokens = npt.NDArray[np.int64]


class Ranks:
    """The tensors of all ranks of an engine, written and compared by what the tokens say."""

    def __init__(self, model: ModelConfig, form: int) -> None:
        self.model, self.form = model, form
        self.tensors = [self._allocated(rank) for rank in range(model.tp_size)]

    def layout(self, rank: int) -> KVCacheLayout:
        kind = (
            KVCacheLayoutType.BLOCKFIRST
            if self.form == ALL_IN_ONE
            else (KVCacheLayoutType.LAYERFIRST)
        )
        model = self.model
        return KVCacheLayout(
            kind,
            LAYERS,
            BLOCKS + rank,
            TOKENS,
            model.heads_per_rank,
            HEAD_SIZE,
            kv_dim=model.kv_dim,
        )

    def _allocated(self, rank: int) -> list[Any]:
        shape = self.layout(rank).kv_shape
        count, own = {
            PER_LAYER: (LAYERS, shape[1:]),
            ALL_IN_ONE: (1, shape),
            # Also of a model with one row for K and V: FlexKV leaves the second half alone.
            K_AND_V_APART: (2 * LAYERS, shape[2:]),
        }[self.form]
        return [shared_zeros(own, self.model.dtype) for _ in range(count)]

    def _rows(self, rank: int, layer: int, kv: int) -> Any:
        """[block, token, head, element]"""
        own = self.tensors[rank]
        if self.form == PER_LAYER:
            return own[layer][kv]
        if self.form == ALL_IN_ONE:
            return own[0][:, layer, kv]
        return own[layer + LAYERS * kv]

    def _cells(self) -> Iterator[tuple[Any, int, int, slice]]:
        """Rows of each rank, and which layer, which of K and V and which heads they are of."""
        per_rank = self.model.heads_per_rank
        for rank in range(self.model.tp_size):
            first = 0 if self.model.kv_dim == 1 else rank * per_rank
            for layer in range(LAYERS):
                for kv in range(self.model.kv_dim):
                    yield self._rows(rank, layer, kv), layer, kv, slice(first, first + per_rank)

    def fill(self, tokens: Tokens, blocks: range) -> None:
        values = _contents(tokens)
        for rows, layer, kv, heads in self._cells():
            rows[blocks.start : blocks.stop] = values[:, layer, kv, None, heads, None]

    def clear(self, blocks: range) -> None:
        for rows, *_ in self._cells():
            rows[blocks.start : blocks.stop] = 0

    def hold(self, tokens: Tokens, blocks: range) -> bool:
        values = _contents(tokens)
        return all(
            (rows[blocks.start : blocks.stop] == values[:, layer, kv, None, heads, None]).all()
            for rows, layer, kv, heads in self._cells()
        )


def _contents(tokens: Tokens) -> npt.NDArray[np.float32]:
    """[block, layer, K or V, head], in numbers that float16 has"""
    seeds = [zlib.crc32(one.tobytes()) for one in tokens.reshape(-1, TOKENS)]
    shape = (LAYERS, 2, HEADS)
    return np.array([np.random.default_rng(one).integers(1, 2000, shape) for one in seeds], "f4")


@contextmanager
def running(model: ModelConfig, cache: CacheConfig, form: int) -> Iterator[tuple[KVManager, Ranks]]:
    with ExitStack() as stack:
        manager = stack.enter_context(KVManager(model, cache))
        ranks = Ranks(model, form)
        for rank, tensors in enumerate(ranks.tensors):
            client = KVTPClient(manager.gpu_register_port, 0, rank)
            stack.callback(client.close)
            client.register_to_server(tensors, ranks.layout(rank))
            client.wait_until_registered(DEADLINE_S)
        assert manager.is_ready()
        yield manager, ranks
        manager.check_integrity()


def slots_of(blocks: range) -> Tokens:
    """FlexKV's own: the first slot of a block stands for each token."""
    return np.array(blocks, np.int64).repeat(TOKENS) * TOKENS


def put(manager: KVManager, tokens: Tokens, blocks: range) -> int:
    return manager.put_async(tokens, slots_of(blocks))


@pytest.mark.parametrize("form", [PER_LAYER, ALL_IN_ONE, K_AND_V_APART])
@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dtype": "float32"},
        {"use_mla": True},
        {"tp_size": 4, "use_mla": True},
        {"tp_size": 4},
    ],
    ids=lambda changed: "-".join(f"{name}_{value}" for name, value in changed.items()) or "plain",
)
def test_kvmanager(changed: dict[str, Any], has_disk: bool, form: int, tmp_path: Path) -> None:
    shape = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE}
    model = ModelConfig(**{**shape, "dtype": "float16", **changed})
    cache = CacheConfig(tokens_per_block=TOKENS, num_cpu_blocks=256 if has_disk else 1024)
    if has_disk:
        cache.enable_ssd, cache.num_ssd_blocks = True, 2048
        cache.ssd_cache_dir = [str(tmp_path / "a"), str(tmp_path / "b")]
    random = np.random.default_rng(7)
    requests = [
        (random.integers(0, 100, PER_REQUEST * TOKENS), range(at, at + PER_REQUEST))
        for at in range(0, BLOCKS, PER_REQUEST)
    ]
    with running(model, cache, form) as (manager, ranks):
        for tokens, blocks in requests[:WRITTEN_FIRST]:
            ranks.fill(tokens, blocks)
            manager.wait([put(manager, tokens, blocks)], DEADLINE_S, completely=True)
            ranks.clear(blocks)
        short = manager.put_async(random.integers(0, 100, TOKENS // 2), np.zeros(TOKENS // 2, "i8"))
        assert manager.wait(short, DEADLINE_S)[short].status is KVResponseStatus.SUCCESS

        gets: dict[int, int] = {}
        puts: dict[int, int] = {}
        for at in range(WRITTEN_FIRST, REQUESTS):
            tokens, blocks = requests[at - WRITTEN_FIRST]
            task, mask = manager.get_match(tokens)
            assert mask.all()
            manager.launch(task, slots_of(blocks))
            gets[task] = at - WRITTEN_FIRST
            tokens, blocks = requests[at]
            ranks.fill(tokens, blocks)
            puts[put(manager, tokens, blocks)] = at
            if len(gets) + len(puts) < 12 and at + 1 < REQUESTS:
                continue
            manager.wait(list(puts), DEADLINE_S, completely=True)
            for request in puts.values():
                ranks.clear(requests[request][1])
            for task, response in manager.wait(list(gets), DEADLINE_S, completely=True).items():
                assert response.status is KVResponseStatus.SUCCESS
                assert response.return_mask is not None
                assert response.return_mask.all()
                assert ranks.hold(*requests[gets[task]])
            gets, puts = {}, {}

        batch = [requests[at] for at in random.choice(REQUESTS, 6, replace=False)]
        matched = [manager.get_match(tokens) for tokens, _ in batch]
        for _, blocks in batch:
            ranks.clear(blocks)
        (whole,) = manager.launch(
            [task for task, _ in matched], [slots_of(blocks) for _, blocks in batch], as_batch=True
        )
        response = manager.wait(whole, DEADLINE_S, completely=True)[whole]
        assert response.status is KVResponseStatus.SUCCESS
        assert all(mask is not None and mask.all() for mask in response.return_masks)
        assert all(ranks.hold(*one) for one in batch)
