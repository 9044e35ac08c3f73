"""A prefill engine holds the blocks that vLLM's lookup in the decode engine needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import needs
import pytest
from elastic_pools import key_of, make_memory, make_pool

from kvelastic.errors import DriverError
from kvelastic.integration.vllm.in_tiers import EngineTiers, NamedBlock
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.stores.peer import engine as peer_engine

# vLLM warns when it is imported, which is not tested here.
pytestmark = [
    pytest.mark.slow,
    needs.vllm,
    pytest.mark.usefixtures("vllm_is_imported"),
    pytest.mark.filterwarnings("ignore"),
]


class Groups:
    """vLLM's own lookup of a request in a decode engine that has none of its blocks."""

    def __init__(self, *groups: tuple[int, int | None]) -> None:
        """Each group: the tokens of a block, and those of the window."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading

        self.configs = [self._config(number, *group) for number, group in enumerate(groups)]
        windows = [at for at, (_, window) in enumerate(groups) if window is not None]
        full = [at for at in range(len(groups)) if at not in windows]
        self.scheduler: Any = object.__new__(offloading.OffloadingConnectorScheduler)
        vars(self.scheduler).update(
            config=SimpleNamespace(kv_group_configs=self.configs),
            _events_tracker=SimpleNamespace(record_lookup=lambda *_: None),
            _full_attention_groups=tuple(full),
            _sliding_window_groups=tuple(windows),
            _lookup_groups=(*full, *windows),
            _mamba_align_size=None,
            _chunks_being_loaded=None,
        )

    @staticmethod
    def _config(number: int, block_tokens: int, window: int | None) -> Any:
        import torch
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        shape = {"block_size": block_tokens, "num_kv_heads": 1, "head_size": 8}
        spec: Any = (
            FullAttentionSpec(**shape, dtype=torch.float32)
            if window is None
            else SlidingWindowSpec(**shape, dtype=torch.float32, sliding_window=window)
        )
        known = {
            "group_idx": number,
            "tokens_per_block": block_tokens,
            "tokens_per_chunk": block_tokens,
            "kv_cache_spec": spec,
            "is_eagle_group": False,
            "sliding_window_size_in_chunks": offloading.get_sliding_window_size_in_chunks(
                spec, block_tokens
            ),
        }
        fields = offloading.GroupOffloadConfig._fields
        return offloading.GroupOffloadConfig(**dict.fromkeys(fields))._replace(**known)

    def request(self, tokens: int) -> Any:
        """A prompt of that many tokens, as vLLM's connector keeps it."""
        return SimpleNamespace(
            config=self.scheduler.config,
            group_states=[
                SimpleNamespace(
                    offload_keys=[
                        bytes([end]) + group.group_idx.to_bytes(4, "big")
                        for end in range(tokens // group.tokens_per_block)
                    ]
                )
                for group in self.configs
            ],
            num_locally_computed_tokens=0,
            max_load_tokens=None,
            req=SimpleNamespace(num_tokens=tokens, request_id="r"),
            req_context=None,
            update_offload_keys=lambda: None,
        )

    def needed(self, tokens: int) -> list[bytes]:
        from kvelastic.integration.vllm.transfer_connector import KvelasticTransfer

        connector: Any = object.__new__(KvelasticTransfer)
        states = {"r": self.request(tokens)}
        connector.connector_scheduler = SimpleNamespace(_req_status=states)
        request = SimpleNamespace(request_id="r", num_prompt_tokens=tokens)
        return [one.name for one in connector._needed(request)]

    def found(self, tokens: int, keys: Sequence[bytes]) -> int:
        """The number of tokens that vLLM loads if these blocks can be read."""
        from vllm.v1.kv_offload.base import LookupResult

        def lookup(key: bytes, _: Any) -> LookupResult:
            return LookupResult.HIT if key in keys else LookupResult.MISS

        self.scheduler.manager = SimpleNamespace(lookup=lookup)
        found: int = self.scheduler._lookup_complete_chunks(self.request(tokens))
        return found


@pytest.mark.parametrize(
    "groups",
    [
        [(32, None)],
        [(32, 64)],
        [(32, 33)],
        [(32, None), (32, 60)],
        [(32, 64), (32, None), (32, 128)],
        [(64, None), (32, 64)],
        [(32, None), (96, 100)],
        [(64, 70), (96, None)],
    ],
)
def test_needed_blocks_are_those_of_the_lookup(groups: list[tuple[int, int | None]]) -> None:
    vllm = Groups(*groups)
    largest = max(block_tokens for block_tokens, _ in groups)
    for tokens in range(1, 7 * largest):
        needed = vllm.needed(tokens)
        found = vllm.found(tokens, needed)
        everything = [key for one in vllm.request(tokens).group_states for key in one.offload_keys]
        assert found == vllm.found(tokens, everything)
        if not found:
            assert tokens <= largest
            continue
        assert tokens - found <= largest
        for key in needed:
            others = [one for one in needed if one != key]
            assert vllm.found(tokens, others) < found, f"{key!r} of {tokens} is held for nothing"


class Peers:
    """Notes the held blocks."""

    prefills = True

    def __init__(self) -> None:
        self.held: list[list[int]] = []
        self.lacks_threads = False

    def hold(self, request: str, ids: list[int], keys: bytes) -> dict[str, str]:
        if self.lacks_threads:
            raise DriverError("no thread could be started to end holds")
        self.held.append(ids)
        return {"ticket": request}


class Expected(list[Any]):
    """The store of prefill engines; notes what is expected."""

    def expect(self, *what: Any) -> None:
        self.append(what)


ASKED = {
    "kvelastic_ticket": "01" * 16,
    "kvelastic_node": 5,
    "kvelastic_address": "unix:///run/prefill",
}


def tiers_that_decode(store: Expected) -> EngineTiers:
    tiers: Any = object.__new__(EngineTiers)
    tiers._namespace, tiers._peers = Namespace("m"), object.__new__(peer_engine.Peers)
    tiers._peers.decodes, tiers._peers.store = True, store
    return tiers


def test_rejected_request_expects_no_block() -> None:
    """vLLM sends its ticket with a prompt of one token, so that it is released."""
    store = Expected()
    tiers_that_decode(store).expect("r", ASKED, [])
    [(request, ticket, keys, peer_keys)] = store
    assert (request, ticket.node_id, keys, peer_keys) == ("r", 5, b"", b"")


@pytest.mark.parametrize("node", ["1e999", "-1e999", "NaN", "null", "[]", '""', str(1 << 64), "-1"])
def test_invented_node_gives_no_ticket(node: str) -> None:
    store = Expected()
    tiers_that_decode(store).expect("r", ASKED | {"kvelastic_node": json.loads(node)}, [])
    assert store == []


def test_missing_block_gives_no_ticket() -> None:
    """1 is the request's without a hash, 2 has left its window, 3 is another request's."""
    pool = make_pool(make_memory()[1])
    peers = Peers()
    tiers: Any = object.__new__(EngineTiers)
    tiers._pool, tiers._peers = pool, peers
    with pool.session():
        blocks = pool.get_new_blocks(3)
        for number, block in enumerate(blocks[1:], 2):
            pool._insert_block_hash(key_of(number), block, num_tokens=32)
    pool.free_blocks([blocks[1]])
    table = [[7], [0, 0, blocks[0].block_id]]
    first = NamedBlock(1, 2, key_of(1))
    ticket = tiers.hold("r", table, [NamedBlock(1, 1, key_of(2)), first])
    assert ticket == {"do_remote_prefill": True, "do_remote_decode": False, "ticket": "r"}
    assert peers.held == [[blocks[1].block_id, blocks[0].block_id]]
    for number in (3, 4):
        assert tiers.hold("r", table, [NamedBlock(1, 1, key_of(number)), first]) is None
    assert tiers.hold("r", table, []) is None
    assert len(peers.held) == 1
    peers.lacks_threads = True
    assert tiers.hold("r", table, [first]) is None
