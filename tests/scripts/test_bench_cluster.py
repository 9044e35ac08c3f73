"""scripts/bench cluster: what the part `memory` starts, sends and shows."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cluster.memory import (
    ARRANGEMENTS,
    AT_ENGINES,
    BLOCK_BYTES,
    HOST_MIB,
    HOSTS,
    MIB,
    MODELS,
    WHOLE,
    Found,
    table,
)
from kvelastic.integration.ray.settings import parse

FOLDER = Path("/model")


def kv_bytes(command: list[str]) -> int:
    return int(command[command.index("--kv-cache-memory-bytes") + 1])


def test_arrangements_use_the_memory_of_each_host() -> None:
    for arrangement in ARRANGEMENTS:
        config = arrangement.config(FOLDER)
        held = sum(kv_bytes(model["command"]) for model in config["models"]) // MIB
        if arrangement.name == "Ray alone":
            hosts = [list(model["resources"]) for model in config["models"]]
            assert (hosts, held) == ([["host0"], ["host1"]], HOSTS * HOST_MIB)
        else:
            placed = sum(model.placed_mib for model in parse(config).models)
            is_fixed = arrangement.name == "fixed parts"
            assert held == (HOST_MIB if is_fixed else HOST_MIB * len(MODELS))
            assert placed == HOST_MIB if is_fixed else placed < HOST_MIB


def test_bursts_need_more_than_half_of_the_memory() -> None:
    tokens = [
        sum(len(each.prompt) + each.answer_tokens for each in WHOLE.burst(name, number))
        for name in MODELS
        for number in range(WHOLE.rounds)
    ]
    needed = [count * BLOCK_BYTES // 32 / (HOSTS * HOST_MIB * MIB) for count in tokens]
    assert 0.6 < min(needed) <= max(needed) < 0.9


SUMS = dict(zip(AT_ENGINES, (6.0, 0.3), strict=True))


def test_table_shows_errors_and_ratio_of_p99() -> None:
    found = {
        "kvelastic": Found({"a0": [0.1, 0.2], "b0": [0.3]}, [], 0, 3, [MIB, 3 * MIB], SUMS),
        "Ray alone": Found({"a0": [0.1, 0.6]}, ["HTTP 500"], 1, 2, [192 * MIB]),
        "fixed parts": Found({}, ["lost"] * 3),
    }
    made = table(WHOLE, found)
    first, second, third = made.rows
    assert first[1:5] == ("0.2 s", "0.3 s", "1.00", "0.2 s")
    assert first[5:] == ("2 s", "0.1 s", "0", "0 of 3", "3 MiB", "2 MiB")
    assert second[1:5] == ("0.6 s", "0.6 s", "2.00", "0.35 s")
    assert second[5:] == ("", "", "1", "1 of 2", "192 MiB", "192 MiB")
    assert third[1:] == ("", "", "", "", "", "", "3", "0 of 0", "", "")
    assert made.notes[-2:] == ["Ray alone: HTTP 500", "fixed parts: lost"]
