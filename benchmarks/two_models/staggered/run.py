"""The whole of it: start the ways' servers, take turns phase by phase, report.

As many ways run at a time as there is memory for, three at most; they take turns, so that what a
shared machine does to one it does to the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks import harness
from benchmarks.two_models.calibration import Speed
from benchmarks.two_models.client import make_burst, run_burst
from benchmarks.two_models.servers import Servers
from benchmarks.two_models.staggered import report
from benchmarks.two_models.staggered.conversations import Conversations
from benchmarks.two_models.staggered.phases import PhaseResult, measure, phases
from benchmarks.two_models.staggered.plan import Plan, plan_for
from benchmarks.two_models.staggered.ways import (
    ELASTIC,
    HALVES,
    OFFLOAD,
    TIERS,
    TIERS_AGAIN,
    TITLES,
    WHOLE,
    launches,
)
from benchmarks.two_models.workload import MODELS

QUICK_WAYS = (HALVES, TIERS, WHOLE)
WITH_CACHE = (*QUICK_WAYS, OFFLOAD, ELASTIC, TIERS_AGAIN)
WITHOUT_CACHE = (HALVES, OFFLOAD, ELASTIC)
"""Tiers are refused without a prefix cache, and all the memory is there to be compared in hits."""

_MOST_AT_A_TIME = 3
_SERVER_BYTES = int(2.3 * 2**30)
"""Of one server, without its KV cache: weights in float32 and three processes with torch."""
_MARGIN_BYTES = 2 << 30
_REST_S = 1.0
"""Idle workers of vLLM spin for so long."""
_CLEANING_S = 7.0
"""An idle instance with tiers has copied what it holds: KVELASTIC_TIER_IDLE_SECONDS and a while.
What it does then is not to fall into the next one's turn."""


def ways_of(*, prefix_cache: bool, quick: bool) -> tuple[str, ...]:
    """Which ways a run has."""
    if quick:
        return QUICK_WAYS if prefix_cache else (HALVES, ELASTIC)
    return WITH_CACHE if prefix_cache else WITHOUT_CACHE


def at_a_time(ways: Sequence[str], available_bytes: int, way_bytes: int) -> list[list[str]]:
    """In the given order, as many at a time as there is memory for; of equal size, roughly.

    Raises MemoryError where there is not enough for one.
    """
    most = min(_MOST_AT_A_TIME, (available_bytes - _MARGIN_BYTES) // way_bytes)
    if most < 1:
        raise MemoryError(
            f"two servers need {(way_bytes + _MARGIN_BYTES) >> 20} MiB of memory, and "
            f"{available_bytes >> 20} are available"
        )
    groups = -(-len(ways) // most)
    size = -(-len(ways) // groups)
    return [list(ways[first : first + size]) for first in range(0, len(ways), size)]


def run(model_folder: Path, speed: Speed, *, prefix_cache: bool, ways: Sequence[str]) -> None:
    """Measure and report; raises what its servers raise."""
    told = harness.facts()
    plan = plan_for(speed)
    with TemporaryDirectory(prefix="kvelastic-two-models-") as work:
        folder = Path(work)
        print(report.plan_lines(plan, prefix_cache=prefix_cache), flush=True)
        way_bytes = 2 * _SERVER_BYTES + 2 * plan.budget_bytes
        groups = at_a_time(ways, psutil.virtual_memory().available, way_bytes)
        results: list[PhaseResult] = []
        left: list[str] = []
        for group in groups:
            print(f"  in turn: {', '.join(TITLES[way] for way in group)}", flush=True)
            started = launches(plan, group, folder, prefix_cache=prefix_cache)
            with Servers(model_folder, folder, started) as servers:
                try:
                    print(
                        f"  {len(started)} servers ready after {servers.start():.0f} s", flush=True
                    )
                    results += _in_turn(servers, plan, group, prefix_cache=prefix_cache)
                    left += servers.stop()
                except Exception:
                    print(servers.log_ends(), file=sys.stderr)
                    raise
    report.write(told, plan, groups, results, left, prefix_cache=prefix_cache)


def _in_turn(
    servers: Servers, plan: Plan, ways: Sequence[str], *, prefix_cache: bool
) -> list[PhaseResult]:
    """Who begins changes from phase to phase."""
    conversations = {(way, model): Conversations(model, plan) for way in ways for model in MODELS}
    for way, model in conversations:
        run_burst(servers[way, model].port, make_burst(2, 64, 8, 0.1, "warm-up"))
    results = []
    for number, phase in enumerate(phases(prefix_cache=prefix_cache)):
        first = number % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            time.sleep(_REST_S)
            said = conversations[way, phase.model]
            results.append(measure(servers, way, phase, plan, said))
            print(report.phase_line(results[-1]), flush=True)
            if way in {TIERS, TIERS_AGAIN}:
                time.sleep(_CLEANING_S)
    return results
