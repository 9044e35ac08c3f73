"""The same prompts, the same tokens: SGLang on kvelastic against stock SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import needs
import pytest
from open_memfds import held_bytes
from sglang_server import PAGE_TOKENS, Answer, SglangServer
from transformers_process import make_prompts
from vllm_server import zero_worker_memory
from waiting import until

from kvelastic import segment

pytestmark = [needs.sglang, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parents[1] / "programs"
MIB = 1 << 20
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 128
BLOCK_BYTES = 2 * LAYERS * PAGE_TOKENS * KV_HEADS * HEAD_DIM * 4
PROMPTS = make_prompts(16, seed=11, shortest=120, longest=250, shared_tokens=3 * PAGE_TOKENS)
"""Each fits a page, of 15 blocks or 63; the burst needs 130: nine pages of one layout, three of the
other."""
NEW_TOKENS = 24
PAGE_BYTES = {"true": 2 * MIB, "false": 2 * LAYERS * 2 * MIB}
"""By KVELASTIC_CONTIGUOUS_LAYOUT: without it each buffer has a page of its own."""


@dataclass
class Pair:
    """An elastic server, what stock answers, and the elastic one's name."""

    server: SglangServer
    expected: list[list[int]]
    name: str
    page_bytes: int

    def limit(self, pages: int | None) -> segment.Answer:
        limit_bytes = self.page_bytes * (1000 if pages is None else pages)
        return segment.request(self.name, limit_bytes=limit_bytes, wait_s=10)

    def usage(self) -> dict[str, int]:
        return segment.inspect(self.name).usage

    def resident_bytes(self) -> int:
        """What the kernel says."""
        return held_bytes(self.server.scheduler().pid)

    def burst(self) -> list[list[int]]:
        return tokens_of(self.server.generate_all(PROMPTS, NEW_TOKENS))


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_model_for_sglang")
    shape = map(str, (LAYERS, KV_HEADS, HEAD_DIM))
    subprocess.run([sys.executable, PROGRAMS / "tiny_model.py", folder, *shape], check=True)
    return folder


@pytest.fixture(scope="module")
def pairs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """Three servers that start together: stock, and kvelastic in both layouts."""
    logs = tmp_path_factory.mktemp("sglang_logs")
    names = {contiguous: f"kvsgl_{contiguous}_{os.getpid()}" for contiguous in PAGE_BYTES}

    def elastic(contiguous: str, *arguments: str) -> SglangServer:
        environment = {
            "ENABLE_KVELASTIC": "true",
            "KVELASTIC_IPC_NAME": names[contiguous],
            "KVELASTIC_CONTIGUOUS_LAYOUT": contiguous,
            "KVELASTIC_SANITY_CHECK": "true",
            "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
        }
        return SglangServer(model, logs / f"elastic_{contiguous}.log", environment, arguments)

    with (
        SglangServer(model, logs / "stock.log", {}, ("--page-size", str(PAGE_TOKENS))) as stock,
        elastic("true") as paged,
        elastic("false", "--sleep-on-idle") as per_buffer,
    ):
        expected = tokens_of(stock.wait_until_ready().generate_all(PROMPTS, NEW_TOKENS))
        stock.kill()
        made = {
            contiguous: Pair(server, expected, names[contiguous], PAGE_BYTES[contiguous])
            for contiguous, server in (("true", paged), ("false", per_buffer))
        }
        for pair in made.values():
            pair.server.wait_until_ready()
        yield made
        for pair in made.values():
            assert pair.server.process.poll() is None, pair.server.tail()
            pair.server.stop()
            assert "hit an exception" not in pair.server.text(), pair.server.tail()
            assert "memory leak" not in pair.server.text(), pair.server.tail()
            assert pair.name not in {info.name for info in segment.list_segments()}


@pytest.fixture(params=PAGE_BYTES, ids=["paged", "per buffer"])
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Iterator[Pair]:
    pair: Pair = pairs[request.param]
    yield pair
    if pair.server.process.poll() is None:
        pair.limit(None)


def test_after_its_start_it_holds_one_page_and_the_same_tokens_come_cold_and_cached(
    pair: Pair,
) -> None:
    assert pair.usage()["mapped_bytes"] <= pair.page_bytes
    cold = pair.server.generate_all(PROMPTS, NEW_TOKENS)
    assert tokens_of(cold) == pair.expected
    assert pair.usage()["mapped_bytes"] > pair.page_bytes
    cached = pair.server.generate_all(PROMPTS, NEW_TOKENS)
    assert tokens_of(cached) == pair.expected
    assert sum(one.cached_tokens for one in cached) > len(PROMPTS) * 120
    assert "No --page-size was given: kvelastic takes 32" in pair.server.text()


def test_what_is_cached_is_held_and_nothing_more(pair: Pair) -> None:
    pair.burst()
    needed = -(
        -(pair.usage()["blocks_in_use"] + pair.usage()["blocks_cached"])
        * BLOCK_BYTES
        // pair.page_bytes
    )
    until(lambda: pair.usage()["mapped_bytes"] <= (needed + 1) * pair.page_bytes, "trimmed")


def test_zeroed_memory_changes_the_tokens_and_a_flush_leaves_one_page(pair: Pair) -> None:
    """The control: the comparison does see bad KV."""
    pair.burst()
    assert zero_worker_memory(pair.server.scheduler()) > 0
    wrong = pair.burst()
    assert sum(a != b for a, b in zip(wrong, pair.expected, strict=True)) > len(PROMPTS) // 2
    # Whoever empties the cache gets right answers again.
    pair.server.post("/flush_cache")
    assert pair.usage()["mapped_bytes"] <= pair.page_bytes
    assert pair.resident_bytes() <= pair.page_bytes
    assert pair.burst() == pair.expected


def test_a_limit_lowered_while_idle_is_met_at_once(pair: Pair) -> None:
    pair.burst()
    assert pair.usage()["mapped_bytes"] > pair.page_bytes
    answer = pair.limit(1)
    assert (answer.state, answer.over_bytes) == ("applied", 0)
    assert pair.resident_bytes() <= pair.page_bytes
    assert pair.burst() == pair.expected
    assert pair.usage()["mapped_bytes"] <= pair.page_bytes


def test_a_limit_lowered_under_load_retracts_and_keeps_the_tokens(pair: Pair) -> None:
    pair.server.post("/flush_cache")
    before = pair.server.retractions
    with ThreadPoolExecutor(1) as thread:
        burst = thread.submit(pair.burst)
        until(lambda: pair.usage()["mapped_bytes"] > pair.page_bytes, "the burst needs more")
        pair.limit(1)
        assert burst.result() == pair.expected
    assert pair.server.retractions > before
    assert pair.usage()["mapped_bytes"] <= pair.page_bytes


def test_one_page_and_back(pair: Pair) -> None:
    pair.server.post("/flush_cache")
    pair.limit(1)
    assert pair.burst() == pair.expected
    assert pair.usage()["mapped_bytes"] <= pair.page_bytes
    pair.limit(None)
    assert pair.burst() == pair.expected
    assert pair.usage()["mapped_bytes"] > pair.page_bytes


@pytest.fixture
def paged(pairs: dict[str, Pair]) -> Iterator[Pair]:
    """The server with small pages."""
    yield pairs["true"]
    pairs["true"].limit(None)


def test_a_request_that_does_not_fit_waits_and_can_be_cancelled(paged: Pair) -> None:
    """Stock answers it with status 500."""
    pair = paged
    large = [3 + index % 500 for index in range(pair.page_bytes // BLOCK_BYTES * PAGE_TOKENS + 100)]
    expected = pair.server.generate(large, 8).tokens
    pair.server.post("/flush_cache")
    pair.limit(1)
    with ThreadPoolExecutor(2) as threads:
        cancelled = threads.submit(pair.server.request, "/generate", "POST", 60, {
            "input_ids": large, "rid": "cancelled", "sampling_params": {"max_new_tokens": 8},
        })  # fmt: skip
        until(lambda: waiting(pair.server) == 1, "it waits")
        pair.server.post("/abort_request", rid="cancelled")
        cancelled.result()
        until(lambda: waiting(pair.server) == 0, "it is gone")
        later = threads.submit(pair.server.generate, large, 8)
        until(lambda: waiting(pair.server) == 1, "it waits")
        pair.limit(None)
        assert later.result().tokens == expected


def test_a_request_that_outgrows_the_limit_waits_for_a_higher_one(paged: Pair) -> None:
    """The last one that runs is retracted, too; stock answers it with status 500."""
    pair = paged
    long, new_tokens = PROMPTS[0][:100], 900
    expected = pair.server.generate(long, new_tokens).tokens
    pair.server.post("/flush_cache")
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(pair.server.generate, long, new_tokens)
        until(lambda: pair.usage()["mapped_bytes"] > pair.page_bytes, "it has outgrown a page")
        pair.limit(1)
        until(lambda: waiting(pair.server) == 1, "it waits")
        pair.limit(None)
        assert answer.result().tokens == expected


def test_released_it_holds_nothing_and_answers_after_it_has_resumed(pair: Pair) -> None:
    pair.burst()
    pair.server.post("/release_memory_occupation")
    assert pair.usage()["mapped_bytes"] == pair.resident_bytes() == 0
    pair.server.post("/resume_memory_occupation")
    assert pair.burst() == pair.expected


def test_an_operator_puts_it_to_sleep_and_wakes_it(pair: Pair) -> None:
    pair.burst()
    assert segment.request(pair.name, asleep=True, wait_s=10).state == "applied"
    assert pair.usage()["mapped_bytes"] == pair.resident_bytes() == 0
    with ThreadPoolExecutor(1) as thread:
        burst = thread.submit(pair.burst)
        until(lambda: waiting(pair.server) == len(PROMPTS), "all wait")
        assert segment.request(pair.name, asleep=False, wait_s=10).state == "applied"
        assert burst.result() == pair.expected


def waiting(server: SglangServer) -> int:
    """Requests that SGLang has and does not run."""
    (load,) = json.loads(server.request("/v1/loads")[1])["loads"]
    return int(load["num_waiting_reqs"])
