"""The same prompts, the same tokens: transformers on kvelastic against stock transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import needs
import pytest
from open_memfds import held_bytes
from transformers_process import TransformersEngine, make_prompts
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import segment

pytestmark = [needs.transformers, pytest.mark.timeout(600)]

MIB = 1 << 20
BLOCKS_OF_A_PAGE = 16
"""Of 64 tokens (4 layers, 2 heads of 32, float32)."""
ARGUMENTS = ("--block-tokens", "64", "--num-blocks", "127")
PROMPTS = make_prompts(16, seed=11, shortest=100, longest=200)
NEW_TOKENS = 24


class Case(NamedTuple):
    series: str
    contiguous: str = "true"
    page_bytes: int = 2 * MIB
    arguments: tuple[str, ...] = ()


CASES = {
    "5.17": Case("5.17"),
    # K and V of its one layer have a page of 2 MiB each, for 16 blocks as well.
    "5.17 per buffer": Case("5.17", "false", 4 * MIB, ("--layers", "1", "--head-dim", "256")),
    # As of 5.18 all layers of a block are one buffer, which both layouts treat alike.
    **{series: Case(series) for series in needs.TRANSFORMERS if series != "5.17"},
    "5.19 per buffer": Case("5.19", "false"),
}

# Engines start slowly: what is alike in them is tried in two of them, and without --all in one.
NEWEST = pytest.param(needs.NEWEST_TRANSFORMERS, marks=pytest.mark.end_to_end)
every_case = pytest.mark.parametrize(
    "shared",
    [NEWEST if case == needs.NEWEST_TRANSFORMERS else case for case in CASES],
    indirect=True,
    scope="module",
)
two_cases = pytest.mark.parametrize("shared", ["5.17", NEWEST], indirect=True, scope="module")


@dataclass
class Pair:
    """An elastic engine, what stock answers, and the elastic one's name."""

    engine: TransformersEngine
    expected: list[list[int]]
    name: str
    page_bytes: int

    def limit(self, pages: int | None) -> segment.Ack:
        limit_bytes = self.page_bytes * (1000 if pages is None else pages)
        return segment.request(self.name, limit_bytes=limit_bytes, wait_s=10)

    def usage(self) -> dict[str, int]:
        return segment.inspect(self.name).usage

    def resident_bytes(self) -> int:
        """What the kernel says."""
        return held_bytes(self.engine.pid)


@pytest.fixture(scope="module")
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    series, contiguous, page_bytes, more = CASES[request.param]
    arguments = [*ARGUMENTS, *more]
    name = f"kvtf_{series}_{contiguous}_{os.getpid()}"
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": name,
        "KVELASTIC_CONTIGUOUS_LAYOUT": contiguous,
        "KVELASTIC_SANITY_CHECK": "true",
        "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
    }
    logs = tmp_path_factory.mktemp("logs")
    with (
        TransformersEngine(series, logs / "stock", arguments) as stock,
        TransformersEngine(series, logs / "elastic", arguments, environment) as engine,
    ):
        stock.wait_until_ready()
        expected = stock.burst(PROMPTS, NEW_TOKENS)
        assert stock.stop() == 0
        assert engine.wait_until_ready().startswith(f"{series}.")
        yield Pair(engine, expected, name, page_bytes)
        assert engine.counters()["fatal_error"] is None
        assert engine.stop() == 0
        assert "Traceback" not in engine.tail()


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    yield shared
    shared.limit(None)


@every_case
def test_starts_with_one_page_and_matches_stock_tokens(
    pair: Pair,
) -> None:
    assert pair.usage()["mapped_bytes"] <= pair.page_bytes
    assert pair.engine.burst(PROMPTS, NEW_TOKENS) == pair.expected
    assert pair.usage()["mapped_bytes"] > 2 * pair.page_bytes
    before = pair.engine.counters()["prefix_tokens"]
    assert pair.engine.burst(PROMPTS, NEW_TOKENS) == pair.expected
    assert pair.engine.counters()["prefix_tokens"] > before


@two_cases
def test_zeroed_memory_changes_the_tokens(pair: Pair) -> None:
    """The control: the comparison does see bad KV."""
    pair.engine.burst(PROMPTS, NEW_TOKENS)
    assert pair.engine.ask("zero")["zeroed"] > 0
    wrong = pair.engine.burst(PROMPTS, NEW_TOKENS)
    assert sum(a != b for a, b in zip(wrong, pair.expected, strict=True)) > len(PROMPTS) // 2
    # Whoever empties the cache gets right answers again.
    assert segment.request(pair.name, asleep=True, wait_s=DEADLINE_S).state == "applied"
    assert pair.usage()["mapped_bytes"] == 0
    assert segment.request(pair.name, asleep=False, wait_s=DEADLINE_S).state == "applied"
    assert pair.engine.burst(PROMPTS, NEW_TOKENS) == pair.expected


@two_cases
def test_limit_lowered_while_idle_is_applied_immediately(pair: Pair) -> None:
    pair.engine.burst(PROMPTS, NEW_TOKENS)
    assert pair.usage()["cached_bytes"] > 2 * pair.page_bytes
    answer = pair.limit(2)
    assert (answer.state, answer.over_bytes) == ("applied", 0)
    assert pair.usage()["mapped_bytes"] <= 2 * pair.page_bytes
    assert pair.resident_bytes() <= 2 * pair.page_bytes
    assert pair.engine.burst(PROMPTS, NEW_TOKENS) == pair.expected


@every_case
def test_limit_lowered_under_load_preempts_and_keeps_tokens(pair: Pair) -> None:
    before = pair.engine.counters()["preemptions"]
    ids = pair.engine.submit(PROMPTS, NEW_TOKENS)
    # What is cached goes first: requests have to hold more than will be allowed.
    wait_until(
        lambda: pair.usage()["blocks_in_use"] > 2 * BLOCKS_OF_A_PAGE, "the burst needs three"
    )
    pair.limit(2)
    assert pair.engine.wait(ids) == pair.expected
    assert pair.engine.counters()["preemptions"] > before
    assert pair.usage()["mapped_bytes"] <= 2 * pair.page_bytes


@every_case
def test_limit_of_one_page_and_back_keeps_tokens(pair: Pair) -> None:
    ids = pair.engine.submit(PROMPTS, NEW_TOKENS)
    pair.limit(1)
    assert pair.engine.wait(ids) == pair.expected
    assert pair.usage()["mapped_bytes"] <= pair.page_bytes
    pair.limit(None)
    assert pair.engine.burst(PROMPTS, NEW_TOKENS) == pair.expected
    assert pair.usage()["mapped_bytes"] > 2 * pair.page_bytes


@two_cases
def test_oversized_request_waits_and_can_be_cancelled(pair: Pair) -> None:
    """Stock ends its loop where nothing can be scheduled."""
    # 18 blocks; one page has 15 besides the null block.
    large = [[3 + index % 500 for index in range(1100)]]
    pair.limit(1)
    (waiting,) = pair.engine.submit(large, 8)
    (other,) = pair.engine.submit(PROMPTS[:1], NEW_TOKENS)
    wait_until(lambda: pair.engine.counters()["waiting"] + pair.engine.counters()["active"] >= 1)
    assert pair.engine.ask("wait", ids=[waiting], timeout_s=0.5)["unfinished"] == [waiting]
    pair.engine.cancel(waiting)
    assert pair.engine.wait([other]) == pair.expected[:1]
    (fits_later,) = pair.engine.submit(large, 8)
    pair.engine.ask("wait", ids=[fits_later], timeout_s=0.2)
    pair.limit(None)
    assert len(pair.engine.wait([fits_later])[0]) == 8
    assert pair.engine.counters()["is_alive"]


@every_case
def test_sleep_unmaps_everything_and_wake_keeps_tokens(pair: Pair) -> None:
    pair.engine.burst(PROMPTS, NEW_TOKENS)
    assert segment.request(pair.name, asleep=True, wait_s=DEADLINE_S).state == "applied"
    assert pair.usage()["mapped_bytes"] == pair.resident_bytes() == 0
    ids = pair.engine.submit(PROMPTS, NEW_TOKENS)
    assert pair.engine.ask("wait", ids=ids, timeout_s=0.5)["unfinished"] == ids
    assert segment.request(pair.name, asleep=False, wait_s=DEADLINE_S).state == "applied"
    assert pair.engine.wait(ids) == pair.expected
