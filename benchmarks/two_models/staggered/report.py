"""What a run says: lines while it goes on, the table at its end, and the file under results/."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import harness, pages
from benchmarks.harness import taken
from benchmarks.two_models.staggered.phases import PhaseResult
from benchmarks.two_models.staggered.plan import Plan
from benchmarks.two_models.staggered.ways import HALVES, TIERS, TIERS_AGAIN, TITLES, WHOLE
from benchmarks.two_models.workload import MIB

LEAST_RATIO = 5.0
LEAST_HITS = 0.95


def plan_lines(plan: Plan, *, prefix_cache: bool) -> str:
    """What the machine can do, and what follows from it."""
    _, burst, back = plan.turns
    return (
        f"  this machine: {plan.speed.prompt_tokens_per_s:.0f} tokens of prompts a second,"
        f" {plan.speed.step_s * 1000:.0f} ms a step with {burst.conversations} under way\n"
        f"  budget {plan.budget_bytes // MIB} MiB, or {plan.half_bytes // MIB} each; a burst:"
        f" {burst.conversations} requests within {burst.over_s:.1f} s, prompts of"
        f" {burst.prompt_tokens} tokens and answers of {burst.answer_tokens}: {plan.part:.2f} of a"
        f" half at once\n  {back.conversations} of them come back with {back.prompt_tokens}"
        f" tokens; prefix cache {'on' if prefix_cache else 'off'}"
    )


def phase_line(result: PhaseResult) -> str:
    """One phase in one way."""
    times = result.first_token_s
    return (
        f"  {result.phase.name}, {TITLES[result.way]}: first token"
        f" {statistics.median(times):.2f} s, the slowest {max(times):.2f} s,"
        f" queued {result.queued_s:.2f} s, {result.preemptions} preemptions,"
        f" {result.own_hit_tokens} + {result.outside_hit_tokens} of {result.prompt_tokens}"
        f" tokens found, {result.total_s:.1f} s in all"
    )


def of_a_way(results: Sequence[PhaseResult]) -> dict[str, Any]:
    """The figures of one way; times to the first token are over all bursts."""
    bursts = [result for result in results if result.phase.is_burst]
    begun = [result for result in results if not result.phase.is_burst]
    first = [s for result in bursts for s in result.first_token_s]
    probes = [s for result in bursts for s in result.probe_first_token_s]
    return {
        "requests": len(first),
        "first_token_p50_s": statistics.median(first),
        "first_token_p99_s": harness.percentile(first, 99),
        "first_token_mean_s": statistics.mean(first),
        "first_token_p50_begun_s": statistics.median(s for r in begun for s in r.first_token_s),
        "probe_first_token_p50_s": statistics.median(probes) if probes else None,
        "probe_first_token_max_s": max(probes) if probes else None,
        "queued_mean_s": statistics.mean(result.queued_s for result in bursts),
        "preemptions": sum(result.preemptions for result in bursts),
        "burst_s": sum(result.total_s for result in bursts),
        "prompt_tokens": sum(result.prompt_tokens for result in bursts),
        "own_hit_tokens": sum(result.own_hit_tokens for result in bursts),
        "outside_hit_tokens": sum(result.outside_hit_tokens for result in bursts),
        "hit_tokens": sum(result.hit_tokens for result in bursts),
        "most_used": max(result.most_used for result in bursts),
    }


def figures(plan: Plan, results: Sequence[PhaseResult]) -> dict[str, Any]:
    """Every way, and what is compared of them."""
    ways = list(dict.fromkeys(result.way for result in results))
    told: dict[str, Any] = {
        way: of_a_way([result for result in results if result.way == way]) for way in ways
    }
    compared: dict[str, Any] = {}
    told["compared"] = compared
    if {HALVES, TIERS} <= set(ways):
        compared["p99_halves_by_tiers"] = _ratio(told[HALVES], told[TIERS], "first_token_p99_s")
    if {TIERS, TIERS_AGAIN} <= set(ways):
        compared["p99_tiers_by_again"] = _ratio(told[TIERS], told[TIERS_AGAIN], "first_token_p99_s")
    if WHOLE in ways:
        in_use = told[WHOLE]["most_used"] * (plan.budget_bytes / plan.half_bytes)
        compared["part_in_use_seen"] = in_use
        if told[WHOLE]["hit_tokens"]:
            compared["hits_by_whole"] = {
                way: told[way]["hit_tokens"] / told[WHOLE]["hit_tokens"] for way in ways
            }
    reference = WHOLE if WHOLE in ways else ways[0]
    compared["answers_that_differ"] = {
        way: _differing(results, reference, way) for way in ways if way != reference
    }
    return told


def _ratio(upper: dict[str, Any], lower: dict[str, Any], key: str) -> float:
    ratio: float = upper[key] / lower[key]
    return ratio


def _differing(results: Sequence[PhaseResult], reference: str, way: str) -> list[int]:
    """Answers that are not those of another way, and how many there are."""
    expected = {result.phase: result.tokens for result in results if result.way == reference}
    pairs = [
        pair
        for result in results
        if result.way == way
        for pair in zip(expected[result.phase], result.tokens, strict=True)
    ]
    return [sum(mine != its for mine, its in pairs), len(pairs)]


def table(told: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row a way."""
    rows: list[tuple[str, ...]] = [
        (
            "way", "first token p50", "p99", "mean", "in the queue", "preempted",
            "found: own + outside", "a probe's, slowest", "all bursts",
        )
    ]  # fmt: skip
    for way, title in TITLES.items():
        if way not in told:
            continue
        of = told[way]
        slowest = of["probe_first_token_max_s"]
        rows.append(
            (
                title,
                f"{of['first_token_p50_s']:.2f} s",
                f"{of['first_token_p99_s']:.2f} s",
                f"{of['first_token_mean_s']:.2f} s",
                f"{of['queued_mean_s']:.2f} s",
                str(of["preemptions"]),
                f"{of['own_hit_tokens'] / of['prompt_tokens']:.1%}"
                f" + {of['outside_hit_tokens'] / of['prompt_tokens']:.1%}",
                "" if slowest is None else f"{slowest:.2f} s",
                f"{of['burst_s']:.0f} s",
            )
        )
    return rows


def summary(told: dict[str, Any], plan: Plan) -> list[str]:
    """The comparisons, each with its bar."""
    compared = told["compared"]
    lines = [f"a burst needs {plan.part:.2f} of a half at once"]
    if "part_in_use_seen" in compared:
        lines[0] += f"; most in use where there is room: {compared['part_in_use_seen']:.2f}"
    if (ratio := compared.get("p99_halves_by_tiers")) is not None:
        lines.append(f"p99, halves by kvelastic with tiers: {ratio:.2f} (bar: {LEAST_RATIO:g})")
    if (ratio := compared.get("p99_tiers_by_again")) is not None:
        lines.append(f"control, p99 of kvelastic with tiers by the same again: {ratio:.2f}")
    for way, part in compared.get("hits_by_whole", {}).items():
        bar = f" (bar: {LEAST_HITS:.0%})" if way == TIERS else ""
        if way != WHOLE:
            lines.append(f"hits of those that all the memory has, {TITLES[way]}: {part:.1%}{bar}")
    for way, (wrong, of) in compared["answers_that_differ"].items():
        lines.append(f"answers that differ, {TITLES[way]}: {wrong} of {of}")
    return lines


def write(
    told: dict[str, Any],
    plan: Plan,
    groups: Sequence[Sequence[str]],
    results: Sequence[PhaseResult],
    left: Sequence[str],
    *,
    prefix_cache: bool,
) -> None:
    """Print the table, and keep everything under results/; `told` is `harness.facts()`."""
    got = figures(plan, results)
    rows = table(got)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    lines = summary(got, plan)
    lines.append(f"left in shared memory after all have ended: {', '.join(left) or 'nothing'}")
    print("\n".join(["", *lines]))
    content = {
        **told,
        "prefix_cache": prefix_cache,
        "plan": asdict(plan)
        | {"part": plan.part, "budget_bytes": plan.budget_bytes, "half_blocks": plan.half_blocks},
        "in_turn": [list(group) for group in groups],
        "figures": got,
        "phases": [_without_tokens(result) for result in results],
        "left": list(left),
    }
    ways = [way for group in groups for way in group]
    page = [f"# Staggered bursts\n\n{taken(told)}.\n"]
    page += [f"| {' | '.join(row)} |" for row in rows]
    page.insert(2, "|---" * len(rows[0]) + "|")
    page += ["", *(f"- {line}" for line in lines)]
    stem = file_stem(ways, prefix_cache=prefix_cache)
    pages.keep("two_models", "\n".join(page), content, is_whole=True, stem=stem)


def file_stem(ways: Sequence[str], *, prefix_cache: bool) -> str:
    """A run of some of the ways only does not take the place of a whole one."""
    some = [] if TIERS_AGAIN in ways or not prefix_cache else ["of", *ways]
    return harness.file_stem("staggered", "cache", "on" if prefix_cache else "off", *some)


def _without_tokens(result: PhaseResult) -> dict[str, Any]:
    fields = asdict(result)
    del fields["tokens"]
    return fields | {"phase": result.phase.name}
