"""What a run says: lines while it goes on, the table at its end, and the files under results/."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import pages
from benchmarks.harness import facts, file_stem, percentile, taken
from benchmarks.two_models import plot
from benchmarks.two_models.bursts import BurstResult
from benchmarks.two_models.memory import Sample, most_held_bytes, most_used_bytes
from benchmarks.two_models.servers import HALVES, SHARED
from benchmarks.two_models.woken import BAR_RATIO, WokenResult
from benchmarks.two_models.workload import MIB, Workload

BAR = 3.0


def workload_lines(workload: Workload) -> str:
    w = workload
    return (
        f"  budget {w.budget_bytes // MIB} MiB, or {w.half_bytes // MIB} each; a burst:"
        f" {w.requests} requests within {w.over_s:.1f} s, prompts of up to {w.prompt_tokens} tokens"
        f" and answers of up to {w.answer_tokens}: {w.burst_bytes / MIB:.0f} MiB at most,"
        f" {w.part:.2f} of a half"
    )


def burst_line(result: BurstResult) -> str:
    times = result.first_token_s
    moved = f", {result.moved_bytes // MIB} MiB moved" if result.way == SHARED else ""
    return (
        f"  round {result.round_number} {result.way} {result.model}: first token"
        f" {statistics.median(times):.2f} s, the slowest {max(times):.2f} s, queued"
        f" {result.queued_s:.2f} s, {result.preemptions} preemptions,"
        f" {result.total_s:.1f} s in all{moved}"
    )


def differing(results: Sequence[BurstResult]) -> tuple[int, int]:
    """Requests whose tokens are not the same in both ways, and how many were compared."""
    by_key = {(r.way, r.model, r.round_number): r.tokens for r in results}
    wrong = compared = 0
    for (way, model, number), tokens in by_key.items():
        other = by_key.get((HALVES, model, number))
        if way == SHARED and other is not None:
            compared += len(tokens)
            wrong += sum(a != b for a, b in zip(tokens, other, strict=True))
    return wrong, compared


def figures(
    workload: Workload, results: Sequence[BurstResult], samples: Sequence[Sample]
) -> dict[str, Any]:
    """Every figure of the table, for both ways and as a ratio where that says something."""
    of = {way: [r for r in results if r.way == way] for way in (HALVES, SHARED)}
    first = {way: [s for r in of[way] for s in r.first_token_s] for way in of}
    told: dict[str, Any] = {
        way: {
            "first_token_p50_s": statistics.median(first[way]),
            "first_token_p99_s": percentile(first[way], 99),
            "first_token_max_s": max(first[way]),
            "queued_mean_s": statistics.mean(r.queued_s for r in of[way]),
            "burst_median_s": statistics.median(r.total_s for r in of[way]),
            "total_s": sum(r.total_s for r in of[way]),
            "preemptions": sum(r.preemptions for r in of[way]),
            "most_used_bytes": most_used_bytes(samples, way),
            "most_granted_bytes": most_held_bytes(samples, way)[0],
            "most_kernel_bytes": most_held_bytes(samples, way)[1],
            "longest_ask_s": max((s.ask_s for s in samples if s.way == way), default=0.0),
            "moved_bytes": [r.moved_bytes for r in of[way]],
        }
        for way in of
    }
    wrong, compared = differing(results)
    slowest = {(r.way, r.model, r.round_number): max(r.first_token_s) for r in results}
    told["p99_ratio"] = told[HALVES]["first_token_p99_s"] / told[SHARED]["first_token_p99_s"]
    told["slowest_ratio_by_burst"] = [
        slowest[HALVES, r.model, r.round_number] / slowest[SHARED, r.model, r.round_number]
        for r in of[SHARED]
    ]
    told["requests_a_way"] = len(first[SHARED])
    told["differing"], told["compared"] = wrong, compared
    told["budget_bytes"] = workload.budget_bytes
    return told


def table(told: dict[str, Any]) -> list[tuple[str, ...]]:
    def seconds(label: str, key: str) -> tuple[str, ...]:
        halves, shared = told[HALVES][key], told[SHARED][key]
        ratio = f"{halves / shared:.2f}" if shared > 0.005 else ""
        return (label, f"{halves:.2f} s", f"{shared:.2f} s", ratio)

    def mib(label: str, key: str) -> tuple[str, ...]:
        return (label, *(f"{told[way][key] / MIB:.0f} MiB" for way in (HALVES, SHARED)), "")

    moved = told[SHARED]["moved_bytes"][1:]  # before the first burst nobody has anything
    return [
        ("figure", "two halves", "one shared budget", "ratio"),
        seconds("time to first token, median", "first_token_p50_s"),
        seconds(f"time to first token, p99 (bar: ratio >= {BAR:g})", "first_token_p99_s"),
        seconds("time to first token, slowest", "first_token_max_s"),
        seconds("waited in vLLM's queue, mean", "queued_mean_s"),
        seconds("a burst until its last token, median", "burst_median_s"),
        seconds("all bursts", "total_s"),
        ("preemptions", *(str(told[way]["preemptions"]) for way in (HALVES, SHARED)), ""),
        mib("most that one model had in use", "most_used_bytes"),
        mib("most memory of both models, granted", "most_granted_bytes"),
        mib("most memory of both models, by the kernel", "most_kernel_bytes"),
        ("moved from the idle model, each burst but the first", "0 MiB",
         f"{statistics.median(moved) / MIB:.0f} MiB"
         f" ({min(moved) // MIB} .. {max(moved) // MIB})", ""),
        ("requests whose tokens differ", "", f"{told['differing']} of {told['compared']}", ""),
    ]  # fmt: skip


def state_lines(afterwards: dict[tuple[str, str], Sample]) -> list[str]:
    """Who holds what when all is over and nothing is asked any more."""
    return [
        f"{way} {model}: granted {s.granted_bytes / MIB:.0f} MiB,"
        f" in use {s.in_use_bytes / MIB:.0f}, cached {s.cached_bytes / MIB:.0f},"
        f" parked {s.parked_bytes / MIB:.0f}, asks for {s.ask_bytes / MIB:.0f};"
        f" by the kernel {s.kernel_bytes / MIB:.0f}"
        for (way, model), s in sorted(afterwards.items())
    ]


def woken_line(awakening: WokenResult) -> str:
    """The first token of a woken model, with what it is measured against."""
    of = awakening
    return (
        "First token of a woken model beside a full, idle neighbour:"
        f" {_times(of.beside_neighbour_s)} (bar: {of.bar_s:.2f} s, {BAR_RATIO:g} times an ordinary"
        f" request's {_times(of.ordinary_s)}, and the page's own price, {of.page_price_s:.2f} s);"
        f" with room on the device {_times(of.with_room_s)}"
    )


def _times(samples: Sequence[float]) -> str:
    return f"{statistics.median(samples):.2f} s ({min(samples):.2f} .. {max(samples):.2f})"


def write(
    workload: Workload,
    results: Sequence[BurstResult],
    samples: Sequence[Sample],
    afterwards: dict[tuple[str, str], Sample],
    awakening: WokenResult,
    left: Sequence[str],
) -> None:
    """Print the table, and keep everything under results/."""
    told = figures(workload, results, samples)
    rows = table(told)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    by_burst = ", ".join(f"{ratio:.1f}" for ratio in told["slowest_ratio_by_burst"])
    state = state_lines(afterwards)
    remains = ", ".join(left) or "nothing"
    print(f"\nslowest first token, halves by shared, burst by burst: {by_burst}")
    print("\n".join(["eight seconds after the last burst:", *(f"  {line}" for line in state)]))
    print(woken_line(awakening))
    print(f"left in shared memory after all have ended: {remains}")

    told_by = facts()
    content = told_by | {
        "workload": asdict(workload) | {"burst_bytes": workload.burst_bytes, "part": workload.part},
        "figures": told,
        "bursts": [_without_tokens(result) for result in results],
        "memory": [asdict(sample) for sample in samples],
        "afterwards": [asdict(sample) for sample in afterwards.values()],
        "woken": asdict(awakening) | {"bar_s": awakening.bar_s},
        "left": list(left),
    }
    lines = ["# Two models, bursts in turn", ""]
    lines += [f"{taken(told_by)}; {workload_lines(workload).strip()}.", ""]
    lines += [f"| {' | '.join(row)} |" for row in rows[:1]] + ["|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows[1:]]
    lines += ["", f"Slowest first token, halves by shared, burst by burst: {by_burst}.", ""]
    lines += ["Eight seconds after the last burst:", "", *(f"- {line}" for line in state), ""]
    lines += [f"{woken_line(awakening)}.", ""]
    lines += [f"Left in shared memory after all have ended: {remains}."]
    page = pages.keep("two_models", "\n".join(lines), content, is_whole=True)
    on = told_by["machine"]
    title = f"{on['cpu']}, {on['cores']} cores, {told_by['date']}"
    plot.draw(page.with_suffix(".png"), title, workload, results, samples)


def write_woken(workload: Workload, awakening: WokenResult, left: Sequence[str]) -> None:
    """Print and keep a run of `--woken`, which measures nothing else."""
    lines = [
        f"{woken_line(awakening)}.",
        f"Left in shared memory after all have ended: {', '.join(left) or 'nothing'}.",
    ]
    print("\n" + "\n".join(lines))
    told = facts()
    content = told | {
        "workload": asdict(workload),
        "woken": asdict(awakening) | {"bar_s": awakening.bar_s},
        "left": list(left),
    }
    page = "\n\n".join(["# The first token of a woken model", f"{taken(told)}.", *lines])
    pages.keep("two_models", page, content, is_whole=True, stem=file_stem("woken"))


def _without_tokens(result: BurstResult) -> dict[str, Any]:
    fields = asdict(result)
    del fields["tokens"]
    return fields | {"moved_bytes": result.moved_bytes}
