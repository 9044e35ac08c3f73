"""Two vLLM: one computes prompts, the other decodes them. The tokens are those of one engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from called_kvctl import kvctl
from engine_server import REQUEST_DEADLINE_S, Request
from known_answers import Known
from prefill_decode_servers import DECODE, PREFILL, Answer, RoleServer, wait_until_blocks_move
from under_tiers import changing_limits
from vllm_server import BLOCK_TOKENS, KV_BYTES, PAGE_BYTES, make_requests
from waiting import wait_until

from kvelastic.shared import segment

sys.path.append(str(Path(__file__).parents[1] / "controller"))
from running import Controller

pytestmark = pytest.mark.timeout(900)

HOLD_S = 30
KILLED = f"{DECODE}_killed"
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
        wait_until_blocks_move(prefill, decode)
        answers = prefill.complete_all(REQUESTS)
        known = [Known(*both) for both in zip(REQUESTS, answers, strict=True)]
        yield Pair(prefill, decode, known, answers)


def controller_of(prefill: RoleServer, decode: RoleServer, **timeouts: float) -> Controller:
    """Two models, as docs/prefill_decode.md has them."""
    models: list[dict[str, Any]] = [
        {"name": "decode", "url": f"http://127.0.0.1:{decode.port}", "prefill": "prefill"},
        {"name": "prefill", "url": f"http://127.0.0.1:{prefill.port}", "timeouts": timeouts},
    ]
    each = {"engine": "vllm", "served_name": "m"}
    return Controller({"models": [model | each for model in models], "sleep": {"min_sleep": 0}})


def through(front: Controller, request: Request) -> Any:
    """The controller's answer: the tokens, or its error."""
    answer = front.post(
        "/v1/completions",
        {
            "model": "decode",
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        timeout=REQUEST_DEADLINE_S,
    ).json()
    return answer["error"]["code"] if "error" in answer else answer["choices"][0]["token_ids"]


def fallbacks(front: Controller) -> dict[str, int]:
    found: dict[str, int] = front.get("/models").json()["models"]["decode"]["prefill_fallbacks"]
    return found


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


@pytest.mark.end_to_end
def test_controller_routes_prompt_and_ticket(pair) -> None:
    request, tokens = pair.next()
    before = pair.decode.pulled()
    with controller_of(pair.prefill, pair.decode) as front:
        assert through(front, request) == tokens
        assert fallbacks(front) == {}
    assert pair.decode.pulled() > before


def test_stopped_prefill_server_is_left_after_its_timeout(pair) -> None:
    request, tokens = pair.next()
    processes = pair.prefill.family()
    with controller_of(pair.prefill, pair.decode, idle=1.0) as front:
        for process in processes:
            process.suspend()
        try:
            assert through(front, request) == tokens
            assert fallbacks(front) == {"engine_timeout": 1}
        finally:
            for process in processes:
                process.resume()
    wait_until(lambda: not pair.prefill.metrics()["num_requests_running"], "it was cancelled")


def test_changing_limits_on_both_keep_the_tokens(pair) -> None:
    with (
        changing_limits(PREFILL, PAGE_BYTES, at_last_bytes=KV_BYTES),
        changing_limits(DECODE, PAGE_BYTES, at_last_bytes=KV_BYTES),
        ThreadPoolExecutor(4) as threads,
    ):
        answers = list(threads.map(pair.tokens, REQUESTS * 2))
    assert answers == pair.answers * 2


def test_killed_decode_server_is_replaced(pair, tiny_model: Path, log_folder: Path) -> None:
    """The request that it was serving fails at once; the next one is served by the other engine."""
    request, tokens = pair.next()
    log = log_folder / "killed.log"
    with RoleServer("decode", tiny_model, log, KVELASTIC_IPC_NAME=KILLED) as decode:
        decode.wait_until_ready()
        with controller_of(pair.prefill, decode) as front, ThreadPoolExecutor(1) as thread:
            long = thread.submit(through, front, request._replace(max_tokens=700))
            wait_until(lambda: decode.metrics()["generation_tokens_total"] > 0)
            decode.kill()
            assert long.result() == "engine_failed"
            assert through(front, request) == tokens
            assert fallbacks(front) == {"decode_engine_unreachable": 1}
    wait_until(lambda: not pair.prefill.held(), "nothing is held for it")


def test_killed_prefill_engine_is_not_missed(pair) -> None:
    request, tokens = pair.next()
    ticket = pair.prefill.prefill(request)
    pair.prefill.kill()
    assert pair.decode.decode(request, ticket) == Answer(tokens, 0)
    assert pair.decode.stop() == 0
