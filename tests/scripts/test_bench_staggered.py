"""scripts/bench two_models --staggered: a burst needs the same part of a half on any machine."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest

from benchmarks.two_models.calibration import Speed
from benchmarks.two_models.servers import (
    MOST_CONVERSATION_TOKENS,
    ledger_name,
    two_models_in_turn,
)
from benchmarks.two_models.staggered.conversations import Conversations
from benchmarks.two_models.staggered.phases import Phase, PhaseResult, phases
from benchmarks.two_models.staggered.plan import PART, Plan, new_tokens, plan_for
from benchmarks.two_models.staggered.report import figures, file_stem, summary
from benchmarks.two_models.staggered.run import WITH_CACHE, at_a_time, ways_of
from benchmarks.two_models.staggered.ways import (
    ELASTIC,
    HALVES,
    OFFLOAD,
    TIERS,
    TIERS_AGAIN,
    WAYS,
    WHOLE,
    launch,
    launches,
)
from benchmarks.two_models.workload import BLOCK_BYTES, BLOCK_TOKENS, MODELS, QUICK
from kvelastic.config import load
from kvelastic.tier_list import parse_tiers

CORES = "VLLM_CPU_OMP_THREADS_BIND"
SPEEDS = [
    Speed(tokens_per_s, step_s)
    for tokens_per_s, step_s in itertools.product((50, 880, 20_000), (0.002, 0.05, 0.4))
]


@pytest.fixture
def plan() -> Plan:
    return plan_for(Speed(880.0, 0.052))


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", SPEEDS)
def test_burst_needs_the_same_share_at_any_speed(speed: Speed) -> None:
    plan = plan_for(speed)
    _, burst, back = plan.turns
    assert plan.part == pytest.approx(PART, rel=0.05)
    assert back.blocks_at_once / plan.half_blocks == pytest.approx(PART, rel=0.1)
    assert burst.blocks_at_once < plan.budget_bytes // BLOCK_BYTES, "all of it must have room"


@pytest.mark.parametrize("speed", SPEEDS)
def test_burst_requests_overlap(speed: Speed) -> None:
    plan = plan_for(speed)
    for turn in plan.turns[1:]:
        assert turn.over_s <= plan.answer_s / 2 * 1.0001


@pytest.mark.parametrize("speed", SPEEDS)
def test_longest_conversation_fits_the_servers(speed: Speed) -> None:
    last = plan_for(speed).turns[-1]
    assert last.prompt_tokens + last.answer_tokens <= MOST_CONVERSATION_TOKENS


def test_twice_the_speed_halves_the_time() -> None:
    slow, fast = plan_for(Speed(800.0, 0.05)), plan_for(Speed(1600.0, 0.025))
    assert fast.budget_pages == slow.budget_pages
    for its, mine in zip(slow.turns, fast.turns, strict=True):
        assert (mine.conversations, mine.prompt_tokens) == (its.conversations, its.prompt_tokens)
        assert mine.answer_tokens == its.answer_tokens
        assert mine.over_s == pytest.approx(its.over_s / 2)


def test_slower_prompts_get_longer_answers() -> None:
    assert plan_for(Speed(300.0, 0.05)).turns[1].answer_tokens > 128
    assert plan_for(Speed(880.0, 0.05)).turns[1].answer_tokens == 128


@pytest.mark.parametrize("bad", [(0.0, 0.05), (800.0, 0.0), (math.inf, 0.1), (math.nan, 0.1)])
def test_invalid_speed_is_rejected(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="invalid speed"):
        plan_for(Speed(*bad))


def test_new_tokens_exclude_full_cached_blocks() -> None:
    # 288 tokens were said, and the last of them was never computed: eight whole blocks.
    assert new_tokens(320, 288) == 320 - 8 * BLOCK_TOKENS
    assert new_tokens(321, 289) == 321 - 9 * BLOCK_TOKENS


def test_alternating_bursts_arrive_faster_on_faster_machines() -> None:
    slow, fast = QUICK.on_machine(0.1), QUICK.on_machine(0.01)
    assert slow.over_s < QUICK.answer_tokens * 0.1
    assert fast.over_s == pytest.approx(slow.over_s / 10)
    assert fast.part == slow.part > 1.2


# --- conversations --------------------------------------------------------------------------------


def test_each_turn_continues_its_conversation(plan: Plan) -> None:
    talk = Conversations("a", plan)
    said: dict[int, list[int]] = {}
    for turn in (1, 2, 3):
        planned = plan.turns[turn - 1]
        requests = talk.requests(turn)
        assert {len(request.prompt) for request in requests} == {planned.prompt_tokens}
        for index, request in zip(talk.taking_part(turn), requests, strict=True):
            assert request.prompt[: len(said.get(index, []))] == said.get(index, [])
        answers = [[turn] * planned.answer_tokens for _ in requests]
        talk.heard(turn, answers)
        for index, request, answer in zip(talk.taking_part(turn), requests, answers, strict=True):
            said[index] = [*request.prompt, *answer]


def test_conversations_have_unique_prefixes_and_runs_repeat(plan: Plan) -> None:
    requests = Conversations("a", plan).requests(1)
    of_b = Conversations("b", plan).requests(1)
    first_blocks = {tuple(request.prompt[:BLOCK_TOKENS]) for request in (*requests, *of_b)}
    assert len(first_blocks) == 2 * len(requests)
    assert Conversations("a", plan).requests(1) == requests


def test_arrivals_are_even_and_within_their_time(plan: Plan) -> None:
    times = [request.at_s for request in Conversations("a", plan).requests(1)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert times[-1] < plan.turns[0].over_s
    assert max(gaps) == pytest.approx(min(gaps))


def test_bursts_alternate_with_the_other_models_turns() -> None:
    names = [phase.name for phase in phases(prefix_cache=True)]
    assert names == [
        "a begins", "a burst", "b begins", "b burst", "a comes back", "b comes back",
    ]  # fmt: skip
    assert not any(phase.turn == 3 for phase in phases(prefix_cache=False))


# --- ways and memory ------------------------------------------------------------------------------


def test_tiers_are_enabled_by_their_variable_alone(plan: Plan, tmp_path: Path) -> None:
    elastic, tiers = (
        launch(plan, way, "a", tmp_path, prefix_cache=True) for way in (ELASTIC, TIERS)
    )
    assert tiers.arguments == elastic.arguments
    assert set(tiers.environment) - set(elastic.environment) == {"KVELASTIC_TIERS"}
    tier = parse_tiers(tiers.environment["KVELASTIC_TIERS"])[0]
    assert (tier.kind, tier.limit_bytes) == ("disk", 2 * plan.budget_bytes)


def test_two_models_share_a_ledger_and_no_core(plan: Plan, tmp_path: Path) -> None:
    started = launches(plan, WITH_CACHE, tmp_path, prefix_cache=True)
    for way in WITH_CACHE:
        a, b = (started[way, model] for model in MODELS)
        assert a.ledger == b.ledger
        assert (a.ledger is None) == (way in {HALVES, OFFLOAD, WHOLE})
        if len(os.sched_getaffinity(0)) > 1:
            assert a.environment[CORES] != b.environment[CORES]
        if a.ledger is not None:
            assert load({**a.environment}).ledger == a.ledger, "the engine would refuse it"
    ledgers = {launch.ledger for launch in started.values()}
    assert len(ledgers) == 4, "ways that share memory with one another compare nothing"


def test_halves_are_stock_vllm(plan: Plan, tmp_path: Path) -> None:
    for way, size in ((HALVES, plan.half_bytes), (WHOLE, plan.budget_bytes)):
        stock = launch(plan, way, "b", tmp_path, prefix_cache=False)
        assert stock.instance is None
        assert set(stock.environment) == {CORES}
        at = stock.arguments.index("--kv-cache-memory-bytes")
        assert stock.arguments[at + 1] == str(size)
        assert "--no-enable-prefix-caching" in stock.arguments


def test_alternating_bursts_use_the_expected_servers() -> None:
    started = two_models_in_turn(QUICK)
    assert len(started) == 4
    assert started["shared", "a"].ledger == started["shared", "b"].ledger == ledger_name()
    assert len({launch.ledger for launch in started.values()}) == 3
    limits = {key: launch.environment.get("KVELASTIC_LIMIT") for key, launch in started.items()}
    assert limits["halves", "a"] == str(QUICK.half_bytes)
    assert limits["shared", "a"] is None


def test_ways_are_grouped_by_available_memory() -> None:
    gib = 1 << 30
    assert at_a_time(WITH_CACHE, 22 * gib, 6 * gib) == [
        list(WITH_CACHE[:3]),
        list(WITH_CACHE[3:]),
    ]
    # Not three and one: the one would have nothing to take turns with.
    assert at_a_time(WITH_CACHE[:4], 200 * gib, 6 * gib) == [
        list(WITH_CACHE[:2]),
        list(WITH_CACHE[2:4]),
    ]
    assert at_a_time(WITH_CACHE[:3], 9 * gib, 6 * gib) == [[way] for way in WITH_CACHE[:3]]
    with pytest.raises(MemoryError, match="8192 MiB of memory, and 7168 are"):
        at_a_time(WITH_CACHE, 7 * gib, 6 * gib)


def test_full_run_has_every_way_and_quick_fewer() -> None:
    assert set(ways_of(prefix_cache=True, quick=False)) == set(WAYS)
    assert set(ways_of(prefix_cache=True, quick=True)) == {HALVES, TIERS, WHOLE}
    for quick in (False, True):
        assert TIERS not in ways_of(prefix_cache=False, quick=quick), "they are refused then"


def test_subset_of_ways_has_its_own_file_name() -> None:
    whole = file_stem(WITH_CACHE, prefix_cache=True)
    assert len({whole, file_stem((HALVES, TIERS), prefix_cache=True)}) == 2
    assert file_stem((HALVES, TIERS), prefix_cache=False) != whole


# --- figures --------------------------------------------------------------------------------------


def result(way: str, phase: Phase, first_s: float, hits: int, token: int = 7) -> PhaseResult:
    return PhaseResult(
        way,
        phase,
        first_token_s=[first_s / 2, first_s],
        probe_first_token_s=[],
        total_s=1.0,
        queued_s=0.0,
        preemptions=1,
        prompt_tokens=1000,
        own_hit_tokens=hits,
        outside_hit_tokens=100,
        most_used=0.75,
        tokens=[[token], [8]],
    )


def test_bars_cover_only_bursts(plan: Plan) -> None:
    def way(name: str, first_s: float, hits: int) -> list[PhaseResult]:
        begun = [result(name, Phase(model, 1), 99.0, 900) for model in MODELS]
        return [*begun, *(result(name, Phase(model, 2), first_s, hits) for model in MODELS)]

    results = [
        *way(HALVES, 8.0, 100), *way(TIERS, 1.0, 660), *way(WHOLE, 1.0, 700),
        *way(TIERS_AGAIN, 2.0, 700),
    ]  # fmt: skip
    told = figures(plan, results)
    assert told[HALVES]["first_token_p99_s"] == 8.0
    compared = told["compared"]
    assert compared["p99_halves_by_tiers"] == 8.0
    assert compared["p99_tiers_by_again"] == 0.5
    assert compared["hits_by_whole"][TIERS] == pytest.approx(760 / 800)
    assert compared["part_in_use_seen"] == pytest.approx(1.5)
    assert compared["answers_that_differ"][TIERS] == [0, 8]
    text = "\n".join(summary(told, plan))
    assert "halves by kvelastic with tiers: 8.00 (bar: 5)" in text
    assert "kvelastic with tiers: 95.0% (bar: 95%)" in text


def test_differing_answers_are_counted(plan: Plan) -> None:
    phase = Phase("a", 2)
    begun = [result(way, Phase("a", 1), 1.0, 0) for way in (WHOLE, TIERS)]
    results = [*begun, result(WHOLE, phase, 1.0, 0), result(TIERS, phase, 1.0, 0, token=6)]
    assert figures(plan, results)["compared"]["answers_that_differ"] == {TIERS: [1, 4]}


def test_run_of_one_way_has_no_comparison(plan: Plan) -> None:
    results = [result(TIERS, Phase("a", turn), 1.0, 0) for turn in (1, 2)]
    told = figures(plan, results)
    assert told["compared"] == {"answers_that_differ": {}}
    assert len(summary(told, plan)) == 1
