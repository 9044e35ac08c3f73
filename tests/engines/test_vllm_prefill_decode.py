"""Two vLLM: one computes prompts, the other decodes them. The tokens are those of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from called_kvctl import kvctl
from engine_server import Request
from known_answers import Known
from prefill_decode_servers import DECODE, PREFILL, Answer, RoleServer
from under_tiers import changing_limits
from vllm_server import BLOCK_TOKENS, KV_BYTES, PAGE_BYTES, make_requests
from waiting import wait_until

from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(900)

HOLD_S = 30
REQUESTS = [one._replace(max_tokens=8) for one in make_requests(12, seed=44, shortest=200)]


class Pair(NamedTuple):
    prefill: RoleServer
    decode: RoleServer
    known: list[Known]
    """Requests of which the decode engine has seen none, with one engine's tokens."""
    answers: list[list[int]]
    """One engine's tokens for all requests."""

    def next(self) -> Known:
        return self.known.pop()

    def tokens(self, request: Request) -> list[int]:
        ticket = self.prefill.prefill(request)
        return self.decode.complete_with(request, ticket)

    def answer(self, request: Request) -> Answer:
        return self.decode.decode(request, self.prefill.prefill(request))


@pytest.fixture(scope="module")
def pair(tiny_model: Path, log_folder: Path) -> Iterator[Pair]:
    hold = {"KVELASTIC_PREFILL_HOLD_SECONDS": str(HOLD_S)}
    with (
        RoleServer("prefill", tiny_model, log_folder / "prefill.log", **hold) as prefill,
        RoleServer("decode", tiny_model, log_folder / "decode.log") as decode,
    ):
        prefill.wait_until_ready()
        decode.wait_until_ready()
        answers = prefill.complete_all(REQUESTS)
        known = [Known(*both) for both in zip(REQUESTS, answers, strict=True)]
        yield Pair(prefill, decode, known, answers)


@pytest.mark.end_to_end
def test_prompt_computed_elsewhere_gives_equal_tokens(pair) -> None:
    request, tokens = pair.next()
    answer = pair.answer(request)
    assert answer == Answer(tokens, len(request.prompt) // BLOCK_TOKENS)


def test_prompt_of_whole_blocks_is_decoded(pair) -> None:
    """All its blocks are pulled, and its last token is computed again in the last of them."""
    prompt = [*REQUESTS[0].prompt[: 5 * BLOCK_TOKENS - 1], 7]
    request = Request(prompt, 40)
    ticket = pair.prefill.prefill(request)
    tokens = pair.decode.complete_with(request, ticket)
    assert tokens == pair.prefill.complete(request)


def test_blocks_present_here_are_not_pulled(pair) -> None:
    request, tokens = pair.next()
    assert pair.answer(request).pulled > 0
    assert pair.answer(request) == Answer(tokens, 0)
    wait_until(lambda: not pair.prefill.held(), "the prefill engine was notified")


def test_ticket_of_another_prompt_is_refused(pair) -> None:
    (held, _), (request, tokens) = pair.next(), pair.next()
    ticket = pair.prefill.prefill(held)
    assert pair.decode.decode(request, ticket).tokens == tokens
    again = pair.decode.decode(held, ticket)
    assert again.pulled == 0, "the first use has ended the hold"


def test_sleeping_prefill_engine_serves_what_it_holds(pair) -> None:
    request, tokens = pair.next()
    ticket = pair.prefill.prefill(request)
    wait_until(pair.prefill.held)
    pair.prefill.post("/sleep?level=1")
    told = kvctl("explain", PREFILL).stdout
    assert "held until a decode engine has read them" in " ".join(told.split())
    answer = pair.decode.decode(request, ticket)
    assert answer.tokens == tokens
    assert answer.pulled > 0
    wait_until(lambda: segment.inspect(PREFILL).usage["mapped_bytes"] == 0, "nothing is held")
    pair.prefill.post("/wake_up")


def test_reset_ends_what_is_held(pair) -> None:
    request, tokens = pair.next()
    ticket = pair.prefill.prefill(request)
    pair.prefill.post("/reset_prefix_cache")
    assert pair.decode.decode(request, ticket) == Answer(tokens, 0)


def test_expired_hold_is_computed_again(pair) -> None:
    request, tokens = pair.next()
    ticket = pair.prefill.prefill(request)
    wait_until(pair.prefill.held)
    wait_until(lambda: not pair.prefill.held(), "the hold has ended by itself")
    assert pair.decode.decode(request, ticket) == Answer(tokens, 0)


def test_stopped_prefill_engine_is_not_awaited(pair) -> None:
    request, tokens = pair.next()
    ticket = pair.prefill.prefill(request)
    core = pair.prefill.processes()["core"]
    core.suspend()
    try:
        assert pair.decode.decode(request, ticket) == Answer(tokens, 0)
    finally:
        core.resume()


def test_changing_limits_on_both_keep_the_tokens(pair) -> None:
    with (
        changing_limits(PREFILL, PAGE_BYTES, at_last_bytes=KV_BYTES),
        changing_limits(DECODE, PAGE_BYTES, at_last_bytes=KV_BYTES),
        ThreadPoolExecutor(4) as threads,
    ):
        answers = list(threads.map(pair.tokens, REQUESTS * 2))
    assert answers == pair.answers * 2


def test_killed_prefill_engine_is_not_missed(pair) -> None:
    request, tokens = pair.next()
    ticket = pair.prefill.prefill(request)
    pair.prefill.kill()
    assert pair.decode.decode(request, ticket) == Answer(tokens, 0)
    assert pair.decode.stop() == 0
