"""The same prompts, the same tokens: SGLang on kvelastic against stock SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import needs
import pytest
from sglang_pair import (
    BLOCK_BYTES,
    NEW_TOKENS,
    PAGED,
    PROMPTS,
    SLEEPS_ON_IDLE,
    Pair,
    Pairs,
    check_log,
    tokens_of,
)
from sglang_server import PAGE_TOKENS, SglangServer
from vllm_server import zero_worker_memory
from waiting import DEADLINE_S, stopped_during, stopped_once, wait_until

from kvelastic.shared import segment

pytestmark = [needs.sglang, pytest.mark.timeout(600)]

LONG_TOKENS = 96
"""A prompt with so many fits a page, too."""


@pytest.mark.end_to_end
def test_starts_with_one_page_and_matches_stock_tokens(
    pair: Pair,
) -> None:
    assert pair.held_after_start_bytes <= pair.page_bytes
    pair.server.post("/flush_cache")
    cold = pair.server.generate_all(PROMPTS, NEW_TOKENS)
    assert tokens_of(cold) == pair.expected
    assert pair.usage()["mapped_bytes"] > pair.page_bytes
    cached = pair.server.generate_all(PROMPTS, NEW_TOKENS)
    assert tokens_of(cached) == pair.expected
    assert sum(one.cached_tokens for one in cached) > len(PROMPTS) * 120
    assert "No --page-size was given: kvelastic takes 32" in pair.server.text()


def test_unused_pages_are_unmapped_after_a_burst(pair: Pair) -> None:
    pair.burst()
    needed = -(
        -(pair.usage()["blocks_in_use"] + pair.usage()["blocks_cached"])
        * BLOCK_BYTES
        // pair.page_bytes
    )
    wait_until(lambda: pair.usage()["mapped_bytes"] <= (needed + 1) * pair.page_bytes, "trimmed")


@pytest.mark.end_to_end
def test_zeroed_memory_changes_tokens_and_flush_recovers(pair: Pair) -> None:
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


def test_limit_lowered_while_idle_is_applied_immediately(pair: Pair) -> None:
    pair.burst()
    assert pair.usage()["mapped_bytes"] > pair.page_bytes
    answer = pair.limit(1)
    assert (answer.state, answer.over_bytes) == ("applied", 0)
    assert pair.resident_bytes() <= pair.page_bytes
    assert pair.burst() == pair.expected
    assert pair.usage()["mapped_bytes"] <= pair.page_bytes


@pytest.mark.end_to_end
def test_limit_lowered_under_load_retracts_and_keeps_tokens(pair: Pair) -> None:
    pair.server.post("/flush_cache")
    # Long enough that whoever runs, wherever it is, needs more blocks.
    expected = tokens_of(pair.server.generate_all(PROMPTS, LONG_TOKENS))
    assert [tokens[:NEW_TOKENS] for tokens in expected] == pair.expected

    def retracts() -> bool:
        """Lower the limit during a burst. On a busy machine the burst may end before that."""
        pair.limit(None)
        pair.server.post("/flush_cache")
        before = pair.server.retractions
        segment.request(pair.name, asleep=True, wait_s=10)
        with ThreadPoolExecutor(1) as thread:
            burst = thread.submit(pair.server.generate_all, PROMPTS, LONG_TOKENS)
            wait_until(lambda: pair.waiting() == len(PROMPTS), "all begin at once")
            segment.request(pair.name, asleep=False, wait_s=0)
            with stopped_once(
                pair.server.scheduler(),
                lambda: burst.done() or pair.usage()["in_use_bytes"] > pair.page_bytes,
                "the burst needs more",
            ):
                pair.limit(1, wait_s=0)
            assert tokens_of(burst.result()) == expected
        return pair.server.retractions > before

    wait_until(retracts, "no request was retracted")
    assert pair.usage()["mapped_bytes"] <= pair.page_bytes


def test_limit_of_one_page_and_back_keeps_tokens(pair: Pair) -> None:
    pair.server.post("/flush_cache")
    pair.limit(1)
    assert pair.burst() == pair.expected
    assert pair.usage()["mapped_bytes"] <= pair.page_bytes
    pair.limit(None)
    assert pair.burst() == pair.expected
    assert pair.usage()["mapped_bytes"] > pair.page_bytes


@pytest.fixture
def paged(sglang_pairs: Pairs) -> Iterator[Pair]:
    """The server with small pages."""
    yield sglang_pairs[PAGED]
    sglang_pairs[PAGED].limit(None)


def test_oversized_request_waits_and_can_be_cancelled(paged: Pair) -> None:
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
        wait_until(lambda: pair.waiting() == 1, "it waits")
        pair.server.post("/abort_request", rid="cancelled")
        cancelled.result()
        wait_until(lambda: pair.waiting() == 0, "it is gone")
        later = threads.submit(pair.server.generate, large, 8)
        wait_until(lambda: pair.waiting() == 1, "it waits")
        pair.limit(None)
        assert later.result().tokens == expected


def test_request_outgrowing_the_limit_waits_for_higher_limit(paged: Pair) -> None:
    """The last one that runs is retracted, too; stock answers it with status 500."""
    pair = paged
    long, new_tokens = PROMPTS[0][:100], 900
    expected = pair.server.generate(long, new_tokens).tokens
    pair.server.post("/flush_cache")
    with ThreadPoolExecutor(1) as thread:
        with stopped_during(
            pair.server.scheduler(),
            lambda: thread.submit(pair.server.generate, long, new_tokens),
            # It needs 2.1 pages at its end: from here it needs more blocks.
            lambda: 1 < pair.usage()["in_use_bytes"] / pair.page_bytes < 1.8,
            "it outgrows a page",
        ) as answer:
            pair.limit(1, wait_s=0)
        wait_until(lambda: pair.waiting() == 1, "it waits")
        pair.limit(None)
        assert answer.result().tokens == expected


def test_release_unmaps_everything_and_resume_keeps_tokens(pair: Pair) -> None:
    pair.burst()
    pair.server.post("/release_memory_occupation")
    assert pair.usage()["mapped_bytes"] == pair.resident_bytes() == 0
    pair.server.post("/resume_memory_occupation")
    assert pair.burst() == pair.expected


def test_release_waits_for_requests_and_resume_is_idempotent(
    pair: Pair,
) -> None:
    """Stock ends where it is released while a request runs, or resumed while it is awake."""
    pair.server.post("/resume_memory_occupation")
    prompt, new_tokens = PROMPTS[0], 300
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(pair.server.generate, prompt, new_tokens)
        # On a busy machine it may have run before it is looked at.
        wait_until(lambda: answer.done() or pair.running() == 1, "it runs")
        pair.server.post("/release_memory_occupation")
        assert len(answer.result().tokens) == new_tokens
        assert pair.usage()["mapped_bytes"] == pair.resident_bytes() == 0
        pair.server.post("/resume_memory_occupation")
        # A request that waits for memory keeps a release waiting, until somebody resumes.
        segment.request(pair.name, asleep=True, wait_s=10)
        answer = threads.submit(pair.server.generate, prompt, new_tokens)
        wait_until(lambda: pair.waiting() == 1, "it waits")
        released = threads.submit(pair.server.post, "/release_memory_occupation")
        pair.server.post("/resume_memory_occupation")
        segment.request(pair.name, asleep=False, wait_s=10)
        assert len(answer.result().tokens) == new_tokens
        released.result()
    pair.server.post("/resume_memory_occupation")
    assert pair.burst() == pair.expected


def test_requests_after_a_release_wait_for_resume(paged: Pair) -> None:
    """Others keep asking, for long answers of different lengths: it is never without a request."""
    pair, is_released = paged, threading.Event()
    prompts = PROMPTS[:6]
    lengths = range(150, 150 + 20 * len(prompts), 20)

    def keep_asking(prompt: list[int], length: int) -> list[list[int]]:
        answers = []
        while not is_released.is_set():
            answers.append(pair.server.generate(prompt, length).tokens)
        return answers

    with ThreadPoolExecutor(len(prompts)) as threads:
        asking = [
            threads.submit(keep_asking, prompt, length)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        try:
            wait_until(lambda: pair.running() == len(prompts), "they run")
            pair.server.post("/release_memory_occupation")
            wait_until(lambda: pair.waiting() == len(prompts), "they wait")
            assert pair.usage()["mapped_bytes"] == pair.resident_bytes() == 0
        finally:
            is_released.set()
            pair.server.post("/resume_memory_occupation")
        for one, expected, length in zip(asking, pair.expected, lengths, strict=False):
            for answer in one.result():
                assert (answer[:NEW_TOKENS], len(answer)) == (expected, length)


def test_operator_sleep_and_wake_keep_the_tokens(pair: Pair) -> None:
    pair.burst()
    assert segment.request(pair.name, asleep=True, wait_s=DEADLINE_S).state == "applied"
    assert pair.usage()["mapped_bytes"] == pair.resident_bytes() == 0
    with ThreadPoolExecutor(1) as thread:
        burst = thread.submit(pair.burst)
        wait_until(lambda: pair.waiting() == len(PROMPTS), "all wait")
        assert segment.request(pair.name, asleep=False, wait_s=DEADLINE_S).state == "applied"
        assert burst.result() == pair.expected


def test_kvctl_limit_reaches_server_with_sleep_on_idle(sglang_pairs: Pairs) -> None:
    """With `--sleep-on-idle` its loop stands still for a second at a time, and no request comes."""
    pair = sglang_pairs[SLEEPS_ON_IDLE]
    pair.burst()
    assert pair.usage()["mapped_bytes"] > pair.page_bytes
    # A request begins with a prefill; the last decode may be logged when it has been answered.
    prefills = pair.server.text().count("Prefill batch, ")
    kvctl = Path(sys.executable).with_name("kvctl")
    limit = [str(kvctl), "limit", pair.name, str(pair.page_bytes), "--wait", "60"]
    done = subprocess.run(limit, capture_output=True, text=True, check=False)
    try:
        assert done.returncode == 0, done.stderr
        assert "applied" in done.stdout
        assert pair.resident_bytes() <= pair.page_bytes
        assert pair.server.text().count("Prefill batch, ") == prefills, "a request has woken it"
        assert pair.burst() == pair.expected
    finally:
        pair.limit(None)


def test_same_tokens_without_radix_cache(
    sglang_pairs: Pairs, sglang_model: Path, tmp_path: Path
) -> None:
    name = f"kvsgl_no_radix_{os.getpid()}"
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": name,
        "KVELASTIC_SANITY_CHECK": "true",
        "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
    }
    log = tmp_path / "no_radix.log"
    with SglangServer(sglang_model, log, environment, ("--disable-radix-cache",)) as server:
        pair = replace(sglang_pairs[PAGED], server=server.wait_until_ready(), name=name)
        for _ in range(2):
            answers = server.generate_all(PROMPTS, NEW_TOKENS)
            assert tokens_of(answers) == pair.expected
            assert sum(answer.cached_tokens for answer in answers) == 0
        wait_until(lambda: pair.usage()["mapped_bytes"] <= pair.page_bytes, "trimmed")
        with ThreadPoolExecutor(1) as thread:
            burst = thread.submit(pair.burst)
            wait_until(
                lambda: pair.usage()["mapped_bytes"] > pair.page_bytes, "the burst needs more"
            )
            pair.limit(1)
            assert burst.result() == pair.expected
        assert pair.usage()["mapped_bytes"] <= pair.page_bytes
        pair.limit(None)
        assert pair.burst() == pair.expected
        pair.server.post("/release_memory_occupation")
        assert pair.usage()["mapped_bytes"] == 0
        pair.server.post("/resume_memory_occupation")
        assert pair.burst() == pair.expected
        pair.end()


@pytest.mark.soak
def test_idle_minute_under_a_limit_finds_no_leak(sglang_pairs: Pairs) -> None:
    """SGLang looks for leaks while it idles, and ends where it finds one."""
    for pair in sglang_pairs.all():
        pair.burst()
        pair.limit(1)
    time.sleep(60)  # nothing is waited for: this is what is tested
    for pair in sglang_pairs.all():
        assert pair.usage()["mapped_bytes"] <= pair.page_bytes
        assert pair.burst() == pair.expected
        pair.limit(None)
        check_log(pair.server)
