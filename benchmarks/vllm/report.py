"""What a run says at its end, and the two files that are kept of it under results/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import pages
from benchmarks.harness import file_stem, machine, number, percentile, taken
from benchmarks.vllm.figures import Row, rows
from benchmarks.vllm.servers import ELASTIC, ORDER, STOCK, Start
from benchmarks.vllm.step_cost import StepCost
from benchmarks.vllm.turns import Compared, Turn

MIB = 1 << 20
KEPT_PERCENTILES = (50, 90, 95, 99, 99.9)


@dataclass
class Findings:
    """Everything that a run has found."""

    model: str
    control: bool
    quick: bool
    began: str
    commit: str
    """When it began: what the first server was started from."""
    load_before: float
    compared: list[Compared] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    steps: list[StepCost] = field(default_factory=list)

    @property
    def stem(self) -> str:
        """Of the files: one for each day, machine, model, and whether it is a control."""
        return file_stem(self.model, *(["control"] if self.control else []))


def text(found: Findings) -> str:
    """Markdown, and readable as it is."""
    told = {"date": found.began, "commit": found.commit, "machine": machine()}
    what = "stock vLLM against stock vLLM, to see the machine" if found.control else "vLLM"
    parts = [
        f"# {what}, {found.model} model",
        f"{taken(told)}; load before: {found.load_before:.1f}.",
    ]
    parts += [load_text(compared) for compared in found.compared]
    if found.starts:
        parts += ["## Start-up to /health", _starts(found.starts)]
    if found.steps:
        parts += ["## The scheduler's own work", _step_table(found.steps)]
    return "\n\n".join(parts) + "\n"


def load_text(compared: Compared) -> str:
    """The part about one load."""
    load = compared.load
    machine_load = median(turn.machine_load for turn in compared.turns[STOCK])
    parts = [
        f"## {load.title}",
        f"{load.turns} turns of {load.requests} requests at each server, {load.kv_blocks}"
        f" blocks of memory each; load while it ran: {machine_load:.1f}.",
        _table(_row_lines(rows(compared.turns))),
        _facts(compared),
    ]
    return "\n\n".join(parts)


def _row_lines(of: Sequence[Row]) -> list[list[str]]:
    lines = [["figure", *ORDER, "ratio", "95% of draws", "bar", "verdict"],
             ["---", "--:", "--:", "--:", "---", "---", "---"]]  # fmt: skip
    for row in of:
        unit = f" {row.unit}" if row.unit else ""
        lines.append(
            [row.title, f"{number(row.stock)}{unit}", f"{number(row.elastic)}{unit}",
             f"{row.ratio:.3f}", f"{row.least:.3f} .. {row.most:.3f}", row.bar, row.verdict]
        )  # fmt: skip
    return lines


def _facts(compared: Compared) -> str:
    turns = compared.turns
    asked = sum(len(turn.first_token_s) for turn in turns[STOCK])
    lines = [
        f"Requests whose tokens differ (warm-up too): {len(compared.differing)}; {asked} counted"
    ]
    if compared.differing:
        lines[0] += f"; of them stock vLLM differs from itself in {compared.differing_from_itself}"
    preempted = {name: sum(turn.preemptions for turn in turns[name]) for name in ORDER}
    lines.append(f"Preemptions: {preempted[STOCK]} stock, {preempted[ELASTIC]} with kvelastic")
    ratios = sorted(e.tokens_per_s / s.tokens_per_s for s, e in zip(*turns.values(), strict=True))
    lines.append(f"Ratios of throughput by turn: {', '.join(f'{r:.3f}' for r in ratios)}")
    mapped = [turn.mapped_bytes / MIB for turn in turns[ELASTIC]]
    if any(mapped):
        lines.append(f"Memory behind the elastic cache after a turn: {min(mapped):.0f} .."
                     f" {max(mapped):.0f} MiB")  # fmt: skip
    return "\n".join(f"- {line}." for line in lines)


def _starts(starts: Sequence[Start]) -> str:
    def line(title: str, bar: str, of: Callable[[Start], float]) -> str:
        every = {name: [of(start) for start in starts if start.server == name] for name in ORDER}
        stock, elastic = (median(every[name]) for name in ORDER)
        samples = "; ".join(
            f"{name} {', '.join(f'{s:.1f}' for s in each)}" for name, each in every.items()
        )
        return (
            f"- {title}: medians {stock:.1f} s and {elastic:.1f} s,"
            f" {elastic - stock:+.1f} s{bar}. {samples}."
        )

    return "\n".join(
        [
            line("by the clock", " (bar: at most 1 s more)", lambda start: start.total_s),
            line("CPU time", "", lambda start: start.cpu_s),
        ]
    )


def _step_table(steps: Sequence[StepCost]) -> str:
    lines = [["microseconds a step, mean", *ORDER, "added", "steps"],
             ["---", "--:", "--:", "--:", "--:"]]  # fmt: skip
    lines += [
        [f"{cost.load}: {part.title}", f"{part.stock_us:.1f}", f"{part.elastic_us:.1f}",
         f"{part.elastic_us - part.stock_us:+.1f}", str(cost.steps)]
        for cost in steps
        for part in cost.parts
    ]  # fmt: skip
    return _table(lines) + "\n\n" + "\n".join(f"- {cost.note}" for cost in steps)


def _table(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() + " |"
        for line in lines
    )


def keep(found: Findings) -> Path:
    """Write the page and the samples; returns the page's path."""
    content = {
        "machine": machine(),
        "commit": found.commit,
        "date": found.began,
        "model": found.model,
        "control": found.control,
        "load_before": found.load_before,
        "starts": [asdict(start) for start in found.starts],
        "loads": [
            {
                "load": _plain(compared),
                "figures": [asdict(row) for row in rows(compared.turns)],
                "differing": len(compared.differing),
                "turns": [_kept(turn) for name in ORDER for turn in compared.turns[name]],
            }
            for compared in found.compared
        ],
        "steps": [asdict(cost) for cost in found.steps],
    }
    return pages.keep("vllm", text(found), content, is_whole=True, stem=found.stem)


def _plain(compared: Compared) -> dict[str, Any]:
    load = asdict(compared.load)
    return {name: str(each) if isinstance(each, range) else each for name, each in load.items()}


def _kept(turn: Turn) -> dict[str, Any]:
    """Without the gaps one by one: their percentiles, and how many there were."""
    fields = asdict(turn)
    del fields["gaps_s"]
    return fields | {
        "gaps": len(turn.gaps_s),
        "gap_ms": {str(p): 1e3 * percentile(turn.gaps_s, p) for p in KEPT_PERCENTILES},
    }
