"""The ways to share a budget between two models, as the servers' arguments and variables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.two_models.servers import (
    Launch,
    cores_of,
    instance_name,
    ledger_name,
    stock_arguments,
    stock_launch,
)
from benchmarks.two_models.staggered.plan import Plan
from benchmarks.two_models.workload import MODELS

HALVES = "halves"
OFFLOAD = "halves_offload"
ELASTIC = "kvelastic"
TIERS = "kvelastic_tiers"
TIERS_AGAIN = "kvelastic_tiers_again"
WHOLE = "whole"
WAYS = (HALVES, OFFLOAD, ELASTIC, TIERS, WHOLE, TIERS_AGAIN)
TITLES = {
    HALVES: "halves",
    OFFLOAD: "halves, vLLM's offload",
    ELASTIC: "kvelastic",
    TIERS: "kvelastic with tiers",
    WHOLE: "all of it for each",
    TIERS_AGAIN: "kvelastic with tiers, again",
}

_HOST_OFFLOAD = Path(__file__).parents[3] / "tests" / "engines"
"""Where the worker is that vLLM's own offloading lacks on a CPU."""


def launches(
    plan: Plan, ways: Iterable[str], folder: Path, *, prefix_cache: bool
) -> dict[tuple[str, str], Launch]:
    """Two servers a way; disk tiers lie in `folder`."""
    return {
        (way, model): launch(plan, way, model, folder, prefix_cache=prefix_cache)
        for way in ways
        for model in MODELS
    }


def launch(plan: Plan, way: str, model: str, folder: Path, *, prefix_cache: bool) -> Launch:
    """One server of a way."""
    if way == HALVES:
        return stock_launch(model, plan.half_bytes, prefix_cache=prefix_cache)
    if way == WHOLE:
        return stock_launch(model, plan.budget_bytes, prefix_cache=prefix_cache)
    if way == OFFLOAD:
        return _offloading(plan, model, prefix_cache=prefix_cache)
    tier = folder / f"{way}_{model}" if way in {TIERS, TIERS_AGAIN} else None
    return _elastic(plan, way, model, tier, prefix_cache=prefix_cache)


def _offloading(plan: Plan, model: str, *, prefix_cache: bool) -> Launch:
    """vLLM's offloading to this machine's memory, with room for all that a tier has room for."""
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloading",
            "spec_module_path": "host_offload",
            "cpu_bytes_to_use": _outside_bytes(plan),
            "offload_prompt_only": False,
            "job_s": 0,
        },
    }
    arguments = [
        *stock_arguments(plan.half_bytes, prefix_cache=prefix_cache),
        "--kv-transfer-config",
        json.dumps(connector),
    ]
    return Launch(arguments, {**cores_of(model), "PYTHONPATH": str(_HOST_OFFLOAD)})


def _elastic(plan: Plan, way: str, model: str, tier: Path | None, *, prefix_cache: bool) -> Launch:
    """Both models in one ledger that has the whole budget."""
    name = instance_name(way, model)
    group = ledger_name(str(WAYS.index(way)))  # its length has a bound
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": name,
        "KVELASTIC_LEDGER": group,
        "KVELASTIC_HOST_MEMORY": str(plan.budget_bytes),
    }
    if tier is not None:
        tier.mkdir(mode=0o700, parents=True, exist_ok=True)
        environment["KVELASTIC_TIERS"] = f"disk:{tier}:{_outside_bytes(plan)}"
    return Launch(
        stock_arguments(plan.budget_bytes, prefix_cache=prefix_cache),
        {**cores_of(model), **environment},
        name,
        group,
    )


def _outside_bytes(plan: Plan) -> int:
    """Outside of the KV cache there is room for all that one model has ever said."""
    return 2 * plan.budget_bytes
