"""Prefill and decode of models with sliding windows and several KV cache groups."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engine_server import Request
from prefill_decode_servers import DECODE, PREFILL, Answer, RoleServer, wait_until_blocks_move
from tiny_architectures import WINDOW
from under_tiers import changing_limits
from vllm_server import BLOCK_TOKENS, KV_BYTES, PAGE_BYTES, make_requests
from waiting import wait_until

pytestmark = pytest.mark.timeout(900)

PROGRAM = Path(__file__).parents[1] / "programs" / "tiny_architectures.py"
WINDOW_BLOCKS = WINDOW // BLOCK_TOKENS
GROUPS = {"sliding_window": (0, 1), "full_and_sliding": (1, 1), "mostly_sliding": (1, 3)}
"""How many groups are full and sliding, by the model's name."""


class Pair(NamedTuple):
    prefill: RoleServer
    decode: RoleServer
    full: int
    sliding: int

    def answer(self, request: Request) -> Answer:
        return self.decode.decode(request, self.prefill.prefill(request))

    def tokens(self, request: Request) -> list[int]:
        return self.decode.complete_with(request, self.prefill.prefill(request))

    def needed(self, blocks: int, present: int = 0) -> int:
        """The records of a prompt of that many blocks, of which the first are present."""
        missing = blocks - present
        return self.full * missing + self.sliding * min(missing, WINDOW_BLOCKS)


@pytest.fixture(scope="module", params=GROUPS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, log_folder: Path
) -> Iterator[Pair]:
    name = request.param
    model = tmp_path_factory.mktemp(name)
    subprocess.run([sys.executable, PROGRAM, name, model], check=True)
    with (
        RoleServer("prefill", model, log_folder / f"prefill_{name}.log") as prefill,
        RoleServer("decode", model, log_folder / f"decode_{name}.log") as decode,
    ):
        prefill.wait_until_ready()
        decode.wait_until_ready()
        wait_until_blocks_move(prefill, decode)
        yield Pair(prefill, decode, *GROUPS[name])
        assert decode.stop() == 0
        assert prefill.stop() == 0


def prompt_of(tokens: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(3, 512) for _ in range(tokens)]


@pytest.mark.parametrize("rest", [0, 1, BLOCK_TOKENS - 1])
def test_only_the_last_window_is_pulled(pair, rest: int) -> None:
    """With the largest rest, a block that is needed has left the prefill engine's window."""
    request = Request(prompt_of(5 * BLOCK_TOKENS + rest, rest), 40)
    answer = pair.answer(request)
    assert answer == Answer(pair.prefill.complete(request), pair.needed(5))
    wait_until(lambda: not pair.prefill.held(), "the prefill engine was notified")


def test_prompt_within_the_window_is_pulled(pair) -> None:
    request = Request(prompt_of(BLOCK_TOKENS + 9, seed=50), 100)
    answer = pair.answer(request)
    assert answer == Answer(pair.prefill.complete(request), pair.needed(1))


def test_present_windows_are_not_pulled(pair) -> None:
    begun = Request(prompt_of(4 * BLOCK_TOKENS + 3, seed=60), 16)
    pair.tokens(begun)
    assert pair.answer(begun).pulled == 0
    longer = Request(begun.prompt + prompt_of(5 * BLOCK_TOKENS, seed=61), 16)
    answer = pair.answer(longer)
    assert answer == Answer(pair.prefill.complete(longer), pair.needed(9, present=4))


def test_changing_limits_on_both_keep_the_tokens(pair) -> None:
    requests = [one._replace(max_tokens=8) for one in make_requests(8, seed=62, shortest=200)]
    with (
        changing_limits(PREFILL, PAGE_BYTES, at_last_bytes=KV_BYTES),
        changing_limits(DECODE, PAGE_BYTES, at_last_bytes=KV_BYTES),
        ThreadPoolExecutor(4) as threads,
    ):
        answers = list(threads.map(pair.tokens, requests))
    assert answers == pair.prefill.complete_all(requests)
