"""Figures beside a floor or a baseline of the same run, in alternation.

    row = compare("alloc(16) + free", pair, floor=("bare call", nop), bar="<= 2 us")

A shared machine changes speed by the second. So the measured calls and the floor take turns, round
by round, and the spread is printed with every median. Nothing here judges: the bar is printed
beside the figure, for the reader.
"""

from __future__ import annotations

import os
import platform
import random
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

RESULTS = Path(__file__).parent


@dataclass
class Figure:
    """One measured quantity: its samples, and those of its floor."""

    name: str
    unit: str
    samples: list[float]
    bar: str = ""
    floor_name: str = ""
    floor_samples: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def median(self) -> float:
        """The figure to quote."""
        return statistics.median(self.samples)

    def percentile(self, percent: float) -> float:
        """A sample with `percent` of the samples at or below it."""
        return percentile(self.samples, percent)

    @property
    def ratio(self) -> float | None:
        """Median of the quotients round by round, where there is a floor of as many rounds."""
        if not self.floor_samples:
            return None
        if len(self.floor_samples) != len(self.samples):
            return self.median / statistics.median(self.floor_samples)
        pairs = zip(self.samples, self.floor_samples, strict=True)
        return statistics.median(mine / other for mine, other in pairs)

    def cells(self) -> tuple[str, ...]:
        """The row of the printed table."""
        floor = ""
        if self.floor_samples:
            floor = f"{self.floor_name} {number(statistics.median(self.floor_samples))}"
        return (
            self.name,
            f"{number(self.median)} {self.unit}",
            f"{number(min(self.samples))} .. {number(max(self.samples))}",
            number(self.percentile(99)),
            floor,
            "" if self.ratio is None else f"{self.ratio:.2f}",
            self.bar,
        )


def number(value: float) -> str:
    """Three significant digits, without an exponent where that can be."""
    return f"{value:.3g}" if 0.001 <= abs(value) < 1000 else f"{value:,.0f}" if value else "0"


def percentile(samples: Sequence[float], percent: float) -> float:
    """A sample with `percent` of the samples at or below it."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def bootstrap_range(
    statistic: Callable[[Sequence[int]], float], count: int, draws: int = 400
) -> tuple[float, float]:
    """The middle 95 % of what `statistic` says of other draws of the same `count` rounds.

    It is called with the numbers of the rounds that were drawn, some of them several times.
    """
    pick = random.Random(0)
    drawn = [statistic(pick.choices(range(count), k=count)) for _ in range(draws)]
    return percentile(drawn, 2.5), percentile(drawn, 97.5)


def per_call_us(call: Callable[[], object], calls: int) -> float:
    """Mean microseconds of one call, over `calls` of them."""
    repeat = range(calls)
    start = time.perf_counter_ns()
    for _ in repeat:
        call()
    return (time.perf_counter_ns() - start) / calls / 1000


def compare(
    name: str,
    call: Callable[[], object],
    *,
    floor: tuple[str, Callable[[], object]],
    calls: int = 20_000,
    rounds: int = 15,
    bar: str = "",
) -> Figure:
    """Microseconds of a Python call beside those of another one, taking turns."""
    floor_name, floor_call = floor
    figure = Figure(name, "us", [], bar, floor_name)
    for _ in range(rounds):
        figure.floor_samples.append(per_call_us(floor_call, calls))
        figure.samples.append(per_call_us(call, calls))
    return figure


HEADINGS = ("figure", "median", "min .. max", "p99", "floor or baseline", "ratio", "bar")


def facts() -> dict[str, Any]:
    """Machine, commit and date, without which a figure is worth nothing."""
    return {
        "machine": machine(),
        "load_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
    }


def taken(told: dict[str, Any]) -> str:
    """`facts()` as a line of a page: date, commit and machine."""
    on = told["machine"]
    return (
        f"{told['date']}, commit {told['commit']}; {on['cpu']}, {on['cores']} cores,"
        f" {on['memory']}, Linux {on['kernel']}, Python {on['python']}"
    )


def file_stem(*more: str) -> str:
    """What a run's files are called: `<date>-<machine>`, and `more` behind it."""
    name = "-".join([time.strftime("%Y-%m-%d"), machine()["cpu"], *more]).lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def half_of_the_cores(*, second: bool) -> str:
    """The first or second half of this process's cores, as "0,1": two servers do not share them."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    return ",".join(map(str, cores[-half:] if second else cores[:half]))


def end_by_exception() -> None:
    """Have signals that end a process raise SystemExit, so that each `finally` runs."""

    def interrupted(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, interrupted)


def commit() -> str:
    """What was measured: HEAD, shortened, `-dirty` with changes; `unknown` outside of git."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, check=False, cwd=RESULTS, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def shortened(value: Any) -> Any:
    """Samples with as many digits as a clock is good for: a tenth of the file's size."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shortened(each) for each in value]
    return value


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    cpu = platform.processor() or platform.machine()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "memory": f"{memory_gib:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
