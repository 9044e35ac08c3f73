"""SGLang with a disk tier: what its radix cache gave up comes back, and nothing is computed again.

What a server answers at first is what it is held to afterwards: that these are stock's tokens is
shown by `test_sglang_tokens`, and that wrong KV would be seen by its control.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import needs
import pytest
from bad_disk import OverDisk
from chaos import SEED, Clients, disturb_for, report
from engine_server import Request
from known_answers import Known
from sglang_pair import check_log
from sglang_server import IN_CHUNKS, PAGE_TOKENS, Answer, SglangServer
from test_sglang_chaos import SglangOperator
from transformers_process import make_prompts
from under_tiers import changing_limits, disk_tier, status_file_of
from waiting import DEADLINE_S, stopped_during, wait_until

from kvelastic.shared import segment
from kvelastic.shared.tier_status import TiersStatus

pytestmark = [needs.sglang, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parents[1] / "programs"
PAGE_BYTES = 2 << 20
KV_BYTES = 1 << 30
DISK_BYTES = 256 << 20
SHORT_S = 12.0
NAME = f"kvsgl_tiers_{os.getpid()}"
PROMPTS = make_prompts(12, seed=23, shortest=150, longest=300, shared_tokens=2 * PAGE_TOKENS)
NEW_TOKENS = 16
NO_MEMORY_FOR_REST = "no memory for the rest of prompt"
"""What the log says where a prompt that has begun gives its memory up."""


class TieredServer(SglangServer):
    """SGLang on kvelastic with one disk tier."""

    def __init__(self, model: Path, log: Path, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        environment = {
            **disk_tier(folder, str(DISK_BYTES)),
            "KVELASTIC_IPC_NAME": NAME,
            "KVELASTIC_LEDGER": f"kvsgl-tiers-{os.getpid()}",
            "KVELASTIC_SANITY_CHECK": "true",
        }
        super().__init__(model, log, environment, IN_CHUNKS)

    def ask_all(self) -> list[Answer]:
        """One after the other: what each finds is told apart."""
        return [self.generate(prompt, NEW_TOKENS) for prompt in PROMPTS]

    def status_file(self) -> TiersStatus:
        return status_file_of(NAME)

    def limit(self, limit_bytes: int) -> None:
        segment.request(NAME, limit_bytes=limit_bytes, wait_s=90)

    def evict(self) -> None:
        """A limit of one page, and back."""
        self.limit(PAGE_BYTES)
        assert segment.inspect(NAME).usage["mapped_bytes"] <= PAGE_BYTES
        self.limit(KV_BYTES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_model_for_sglang_tiers")
    subprocess.run(
        [sys.executable, PROGRAMS / "tiny_model.py", folder, "2", "2", "128"], check=True
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang_tiers") / "disk"


@pytest.fixture(scope="module")
def server(model: Path, folder: Path) -> Iterator[TieredServer]:
    with TieredServer(model, folder.parent / "tiers.log", folder) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def expected(server: TieredServer) -> list[list[int]]:
    return [answer.tokens for answer in server.ask_all()]


@pytest.fixture(scope="module")
def again(server, expected, model: Path, folder: Path) -> Iterator[TieredServer]:
    """Another over the same disk, after the first one was killed.

    What comes after a `/flush_cache` is hidden from the next server, too: the first has none.
    """
    server.post("/release_memory_occupation")  # demotes all
    server.kill()
    with TieredServer(model, folder.parent / "tiers_again.log", folder) as again:
        yield again.wait_until_ready()


def check_found(answers: list[Answer], expected: list[list[int]]) -> None:
    """At most the last block is computed, or of a whole one its last token."""
    assert [answer.tokens for answer in answers] == expected
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert len(prompt) - answer.cached_tokens <= PAGE_TOKENS


def test_evicted_prefixes_are_loaded_from_the_tier(server, expected) -> None:
    server.evict()
    usage = segment.inspect(NAME).usage
    assert usage["blocks_in_use"] + usage["blocks_cached"] < len(PROMPTS) * 2, "it was evicted"
    check_found(server.ask_all(), expected)


def test_concurrent_requests_load_from_the_tier(server, expected) -> None:
    """They have a beginning in common, which is loaded once."""
    server.evict()
    answers = server.generate_all(PROMPTS, NEW_TOKENS)
    check_found(answers, expected)


def test_sleep_and_release_demote_blocks_for_reuse(server, expected) -> None:
    assert segment.request(NAME, asleep=True, wait_s=DEADLINE_S).state == "applied"
    assert segment.request(NAME, asleep=False, wait_s=DEADLINE_S).state == "applied"
    check_found(server.ask_all(), expected)
    server.post("/release_memory_occupation")
    assert segment.inspect(NAME).usage["mapped_bytes"] == 0
    server.post("/resume_memory_occupation")
    check_found(server.ask_all(), expected)


def test_changing_limits_keep_the_tokens(server, expected) -> None:
    with changing_limits(NAME, PAGE_BYTES, at_last_bytes=KV_BYTES):
        rounds = [server.generate_all(PROMPTS, NEW_TOKENS) for _ in range(3)]
    assert [[one.tokens for one in answers] for answers in rounds] == [expected] * 3


def test_prefixes_displaced_by_others_are_loaded_again(server, expected) -> None:
    """Under a limit of two pages prompts displace one another."""
    server.limit(2 * PAGE_BYTES)
    try:
        for _ in range(2):
            check_found(server.ask_all(), expected)
    finally:
        server.limit(KV_BYTES)


def test_prefix_load_waits_for_memory(server, expected) -> None:
    assert segment.request(NAME, asleep=True, wait_s=DEADLINE_S).state == "applied"
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = [threads.submit(server.generate, prompt, NEW_TOKENS) for prompt in PROMPTS]
        wait_until(lambda: server.load("num_waiting_reqs") == len(PROMPTS), "all were looked up")
        assert segment.request(NAME, asleep=False, wait_s=DEADLINE_S).state == "applied"
        check_found([answer.result() for answer in answers], expected)


def test_restarted_server_finds_objects_but_not_after_flush(again, expected) -> None:
    check_found(again.ask_all(), expected)
    again.post("/flush_cache")
    assert segment.inspect(NAME).usage["mapped_bytes"] <= PAGE_BYTES
    answers = again.ask_all()
    assert [answer.tokens for answer in answers] == expected
    assert answers[0].cached_tokens == 0, "found what was flushed"
    wait_until(lambda: again.status_file().tiers[0].errors == 0, "the status file is there")


def test_chunked_prompt_continues_if_its_rest_fits(again) -> None:
    """15 blocks are there; after three chunks of four there are three, for a rest of one."""
    prompt = [3 + index % 500 for index in range(12 * PAGE_TOKENS + 20)]
    expected = again.generate(prompt, NEW_TOKENS).tokens
    again.post("/flush_cache")
    again.limit(PAGE_BYTES)
    try:
        assert again.generate(prompt, NEW_TOKENS).tokens == expected
    finally:
        again.limit(KV_BYTES)
    assert NO_MEMORY_FOR_REST not in again.text(), "rounds without a chunk mean nothing"


def test_started_prompt_yields_memory_and_continues_later(again) -> None:
    prompts: list[list[int]] = []

    def ask_another() -> Future[Answer]:
        prompts.append([3 + (len(prompts) + index) % 499 for index in range(1900)])
        return thread.submit(again.generate, prompts[-1], NEW_TOKENS)

    with ThreadPoolExecutor(1) as thread:
        with stopped_during(
            again.scheduler(),
            ask_another,
            lambda: 15 < segment.inspect(NAME).usage["blocks_in_use"] < 50,
            "a prompt has begun",
        ) as answer:
            segment.request(NAME, limit_bytes=PAGE_BYTES)
        wait_until(lambda: NO_MEMORY_FOR_REST in again.text(), "it waits")
        assert segment.request(NAME, asleep=True, wait_s=DEADLINE_S).state == "applied"
        assert segment.inspect(NAME).usage["mapped_bytes"] == 0
        assert segment.request(NAME, asleep=False, wait_s=DEADLINE_S).state == "applied"
        again.limit(KV_BYTES)
        tokens = answer.result().tokens
    again.post("/flush_cache")
    assert again.generate(prompts[-1], NEW_TOKENS).tokens == tokens


class TieredOperator(OverDisk, SglangOperator):
    """Everything that `test_sglang_chaos` does, over the disk."""

    disk_bytes = DISK_BYTES


def test_random_requests_over_a_disk(again, expected, capsys: pytest.CaptureFixture[str]) -> None:
    known = [
        Known(Request(prompt, NEW_TOKENS), tokens)
        for prompt, tokens in zip(PROMPTS, expected, strict=True)
    ]
    with Clients(known) as clients:
        operator = TieredOperator(again, NAME, clients, random.Random(SEED))
        disturb_for(operator, SHORT_S)
    clients.check()
    report(capsys, SHORT_S, clients)
    check_log(again)
    assert [answer.tokens for answer in again.ask_all()] == expected
