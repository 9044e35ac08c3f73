"""What a run has found: the table beside the bars, and the files that are kept of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import pages
from benchmarks.harness import commit, machine, number, taken
from benchmarks.router.stalls import MAX_BODY_BYTES

SERVERS = ["engine", "bare", "controller"]
Rounds = dict[str, dict[str, list[dict[str, float]]]]
"""By measurement and server: what the load saw, a row a round."""


@dataclass(frozen=True)
class Row:
    """A line of the table; what it says of the controller is taken round by round."""

    measurement: str
    key: str
    title: str
    against: str
    """`bare`: the controller's part of it. `engine`: what the controller adds to it. `nothing`:
    the controller's own figure is what is held to the bar."""
    is_met: Callable[[float], bool] | None = None
    bar: str = ""


def rows(told: dict[str, Any]) -> list[Row]:
    """All of them."""
    clients = told["clients"]
    saturated = f"{clients} clients, each asks again at once"
    rate = f"{told['rate_per_s']:g} a second from {clients} clients"
    paced = f"{clients} streams, a chunk every {told['pace_ms']} ms"
    added: dict[str, Any] = {
        "p50": {"is_met": lambda x: x <= 1.0, "bar": "<= 1 ms added"},
        "p99": {"is_met": lambda x: x <= 5.0, "bar": "<= 5 ms added"},
    }

    def first_byte(name: str, how: str, judged: bool) -> list[Row]:
        return [
            Row(name, f"{p}_ms", f"first byte {p}, ms: {how}", "engine", **(a if judged else {}))
            for p, a in added.items()
        ]

    at_least: dict[float, Any] = {
        each: {"is_met": lambda x, least=each: x >= least, "bar": f">= {each} of bare"}
        for each in (0.9, 0.95)
    }
    return [
        Row("requests", "answers_per_s", f"requests/s: {saturated}", "bare", **at_least[0.9]),
        Row("requests", "cpu_us", "CPU time of a request, us", "bare"),
        Row("streams", "chunks_per_s", f"chunks/s: {saturated}", "bare", **at_least[0.95]),
        Row("streams", "cpu_us", f"CPU time of a stream of {told['chunks']} chunks, us", "bare"),
        *first_byte("rate", rate, judged=True),
        *first_byte("paced", paced, judged=True),
        *first_byte("requests", saturated, judged=False),
        Row(
            "stalls",
            "longest_ms",
            f"longest wait of small requests, ms: hostile bodies of {MAX_BODY_BYTES >> 20} MiB",
            "nothing",
            is_met=lambda x: x <= 100.0,
            bar="<= 100 ms",
        ),
    ]


def compared(row: Row, found: Rounds) -> list[float]:
    """The controller against what it is held to, a figure a round."""
    mine = [each[row.key] for each in found[row.measurement]["controller"]]
    if row.against == "nothing":
        return mine
    other = [each[row.key] for each in found[row.measurement][row.against]]
    if row.against == "bare":
        return [m / o for m, o in zip(mine, other, strict=True)]
    return [m - o for m, o in zip(mine, other, strict=True)]


def table(found: Rounds, told: dict[str, Any]) -> str:
    """Markdown, and readable as it is."""
    lines = [
        ["figure (medians)", *SERVERS, "compared", "min .. max", "bar", "met"],
        ["---", "--:", "--:", "--:", "--:", "--:", "---", "---"],
    ]
    for row in rows(told):
        if row.measurement not in found:
            continue
        by_server = found[row.measurement]
        middles = [number(median(r[row.key] for r in by_server[each])) for each in SERVERS]
        samples = compared(row, found)
        middle = median(samples)
        sign = "+" if row.against == "engine" else ""
        unit = " of bare" if row.against == "bare" else " ms"
        lines.append(
            [
                row.title,
                *middles,
                f"{middle:{sign}.2f}{unit}",
                f"{min(samples):{sign}.2f} .. {max(samples):{sign}.2f}",
                row.bar,
                "" if row.is_met is None else "yes" if row.is_met(middle) else "NO",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def keep(found: Rounds, told: dict[str, Any]) -> None:
    """Keep the table as the page, and every sample."""
    content = told | {"machine": machine(), "commit": commit(), "found": found}
    page = (
        f"# Router benchmark\n\n{taken(content)}; load before:"
        f" {told['load_before']}. {told['rounds']} rounds of {told['seconds']:g} s each.\n\n"
        f"{table(found, told)}"
    )
    pages.keep("router", page, content, is_whole=True)
