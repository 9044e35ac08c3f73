"""Room and capacity of a node, from its ledgers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

from kvelastic.device.machine import DeviceFacts
from kvelastic.integration.ray.node_resources import capacity_bytes
from kvelastic.integration.ray.node_room import room_bytes
from kvelastic.shared.ledger_facts import LedgerInfo, Member

MIB = 1 << 20


def member(name: str, **more: Any) -> Member:
    nothing: dict[str, Any] = dict.fromkeys(
        ("granted_bytes", "min_bytes", "priority", "in_use_bytes", "evictable_bytes"), 0
    )
    facts = {**nothing, "parked_bytes": 0, "page_bytes": 2 * MIB, "limit_bytes": 1000 * MIB}
    base = Member(
        name=name, uuid=name.encode(), pid=1, status="alive", idle_s=0.0, ask_bytes=0, ask_s=0.0,
        wanted_bytes=0, **facts,
    )  # fmt: skip
    return replace(base, **more)


def room_mib(mine: Member, *others: Member, capacity_mib: int = 100) -> float:
    info = LedgerInfo(
        "host", "readable", capacity_bytes=capacity_mib * MIB, members=(mine, *others)
    )
    return room_bytes(info, mine) / MIB


def test_lone_instance_room_excludes_only_blocks_in_use() -> None:
    assert room_mib(member("a")) == 100
    used = member("a", granted_bytes=60 * MIB, evictable_bytes=20 * MIB, parked_bytes=10 * MIB)
    assert room_mib(used) == 70


def test_limit_bounds_the_room() -> None:
    assert room_mib(member("a", limit_bytes=24 * MIB)) == 24


def test_neighbour_cache_counts_as_room() -> None:
    other = member("b", granted_bytes=80 * MIB, evictable_bytes=50 * MIB)
    assert room_mib(member("a"), other) == 70


def test_neighbour_guarantee_reduces_room_unless_asleep() -> None:
    assert room_mib(member("a"), member("b", min_bytes=40 * MIB)) == 60
    assert room_mib(member("a"), member("b", min_bytes=40 * MIB, asleep=True)) == 100


def test_full_device_has_no_room() -> None:
    assert room_mib(member("a"), member("b", granted_bytes=200 * MIB)) == 0


def test_capacity_uses_gpus_or_falls_back_to_host() -> None:
    host = DeviceFacts("host", "host", total_bytes=64, capacity_bytes=48)
    gpus = [DeviceFacts("gpu", "H100", uuid=f"GPU-{n}", total_bytes=80) for n in "12"]
    parts = [
        DeviceFacts("mig", "1g", uuid=f"MIG-{n}", parent="GPU-1", total_bytes=10) for n in "34"
    ]
    assert capacity_bytes((host,), [], "default") == 48
    assert capacity_bytes((host, *gpus), [], "default") == 160
    assert capacity_bytes((host, *gpus, *parts), [], "default") == 100


def test_existing_ledger_overrides_device_capacity() -> None:
    host = DeviceFacts("host", "host", total_bytes=64, capacity_bytes=48)
    info = LedgerInfo("host", "readable", group="default", capacity_bytes=40)
    assert capacity_bytes((host,), [info], "default") == 40
    assert capacity_bytes((host,), [info], "other") == 48


def test_node_resources_program_prints_ray_resources() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "kvelastic.integration.ray.node_resources"],
        env={**os.environ, "KVELASTIC_HOST_MEMORY": "512M"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert json.loads(said)["kvelastic_mib"] > 0
