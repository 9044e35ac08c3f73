"""What kvelastic adds to a step of the scheduler, in microseconds, with no noise worth naming.

    for cost in measure(model, folder, quick=False, control=False):
        cost.parts[0].elastic_us - cost.parts[0].stock_us

Both engines do the same steps, several times over, each in one process and without a server; they
take turns process by process. Of each step the fastest time counts: what disturbs a step on a busy
machine makes it slower, never faster, and a cost that is always there is in the fastest one too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from vllm_server import engine_environment

from benchmarks.vllm.models import ROOT, Model
from benchmarks.vllm.servers import ELASTIC, ORDER, STOCK, environment
from benchmarks.vllm.workload import MIXED, SATURATED, Load

LOADS = (MIXED, SATURATED)
CALLS = ("schedule", "update_from_output", "free")
TITLES = ("schedule", "update_from_output", "of that, requests' blocks given back")
MOST_REQUESTS = 64
KV_BLOCKS = 128
"""Nearly enough for 16 requests at once, far too little for 64: one engine serves both loads."""
RUN_DEADLINE_S = 900.0
_ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Of the model: more would wait for each other on a busy machine, and none of it is timed here."""


@dataclass(frozen=True)
class Part:
    title: str
    stock_us: float
    elastic_us: float


@dataclass(frozen=True)
class StepCost:
    """Of one load."""

    load: str
    steps: int
    parts: list[Part]
    note: str


def measure(model: Model, folder: Path, *, quick: bool, control: bool) -> list[StepCost]:
    """Both loads; raises `subprocess.SubprocessError` if an engine ends badly."""
    processes, repeats = (1, 5) if quick else (2, 12)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ORDER}
    for number in range(processes):
        for name in ORDER if number % 2 == 0 else ORDER[::-1]:
            print(f"  {name}'s scheduler, process {number + 1} of {processes}", flush=True)
            runs[name].append(_run(model, folder, name, repeats, control=control))
    for line in runs[ELASTIC][-1]["profile"]:
        print(f"    {line}")
    return [
        _cost(load, {name: [r[load.name] for r in runs[name]] for name in ORDER}) for load in LOADS
    ]


def _run(model: Model, folder: Path, name: str, repeats: int, *, control: bool) -> dict[str, Any]:
    plan, result = folder / "step_cost_plan.json", folder / "step_cost.json"
    plan.write_text(
        json.dumps(
            {
                "model": str(model.folder),
                "repeats": repeats,
                "most_at_once": max(load.at_once for load in LOADS),
                "kv_cache_bytes": KV_BLOCKS * model.block_bytes,
                "result": str(result),
                "loads": {
                    load.name: (load.turn(0)[:MOST_REQUESTS], load.at_once) for load in LOADS
                },
            }
        )
    )
    with (folder / f"step_cost_{name}.log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.vllm.timed_engine", plan],
            env=engine_environment(
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
                **_ONE_THREAD,
                **environment(folder, name, control=control),
            ),
            check=False,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=RUN_DEADLINE_S,
        )
    if done.returncode:
        tail = Path(log.name).read_text(errors="replace")[-4000:]
        raise subprocess.SubprocessError(f"{name} ended with {done.returncode}:\n{tail}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _cost(load: Load, runs: dict[str, list[dict[str, Any]]]) -> StepCost:
    shapes = {name: [shape for run in runs[name] for shape in run["shapes"]] for name in ORDER}
    same = all(shape == shapes[STOCK][0] for name in ORDER for shape in shapes[name])
    steps = len(shapes[STOCK][0])

    def fastest_us(name: str, call: str) -> float:
        rounds: list[list[int]] = [each for run in runs[name] for each in run["ns"][call]]
        fastest: list[int] = [min(times) for times in zip(*rounds, strict=False)]
        return mean(fastest) / 1e3

    parts = [
        Part(title, fastest_us(STOCK, call), fastest_us(ELASTIC, call))
        for call, title in zip(CALLS, TITLES, strict=True)
    ]
    parts.append(Part("both, CPU time of the thread", *(_cpu_us(runs[name]) for name in ORDER)))
    preempted = {name: max(run["preempted"] for run in runs[name]) for name in ORDER}
    note = (
        f"{load.name}: {'the same steps in both' if same else 'STEPS DIFFER, so means only'};"
        f" preempted {preempted[STOCK]} stock, {preempted[ELASTIC]} with kvelastic"
    )
    return StepCost(load.name, steps, parts, note)


def _cpu_us(runs: Sequence[dict[str, Any]]) -> float:
    rounds: list[list[int]] = [each for run in runs for each in run["cpu_ns"]]
    fastest: list[int] = [min(times) for times in zip(*rounds, strict=False)]
    return mean(fastest) / 1e3
