"""Every surface says the same of an instance: one process put into each state, and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_instance import BLOCKS_PER_PAGE, PAGE_BYTES, Instance
from metrics_text import render
from prometheus_client.parser import text_string_to_metric_families
from segment_owner import Owner, until_replied
from waiting import DEADLINE_S

from kvelastic.cli.kvtop.scene import scene_of
from kvelastic.controller.models import instance_memory
from kvelastic.instance.metric_table import STATES
from kvelastic.instance.outcome import Verdict, outcome_of
from kvelastic.instance.status import UNLIMITED_BYTES
from kvelastic.shared import ledger, segment
from kvelastic.shared.segment import Request

pytestmark = pytest.mark.slow


KVCTL = str(Path(sys.executable).with_name("kvctl"))
FIELDS = (
    "capacity_bytes",
    "mapped_bytes",
    "in_use_bytes",
    "cached_bytes",
    "parked_bytes",
    "slack_bytes",
    "limit_bytes",
    "effective_limit_bytes",
    "over_bytes",
    "min_bytes",
    "priority",
    "reserved_bytes",
)


def kvctl(*words: str) -> str:
    done = subprocess.run([KVCTL, *words], capture_output=True, text=True, check=True)
    return done.stdout


def surfaces(name: str) -> dict[str, dict[str, object]]:
    """What each surface says of one instance, by the keys of `FIELDS` and `state`."""
    samples = {
        sample.name.removeprefix("kvelastic_instance_"): sample.value
        for family in text_string_to_metric_families(
            render(segment.list_segments(), ledger.list_ledgers())
        )
        for sample in family.samples
        if sample.labels.get("name") == name and sample.labels.get("state") is None
    }
    states = [
        sample.labels["state"]
        for family in text_string_to_metric_families(render(segment.list_segments(), []))
        for sample in family.samples
        if sample.name == "kvelastic_instance_state"
        and sample.labels["name"] == name
        and sample.value == 1
    ]
    (shown,) = scene_of(segment.list_segments(), ledger.list_ledgers(), 0.0, [name]).instances
    (listed,) = json.loads(kvctl("list", name, "--json"))
    return {
        "kvctl list": listed,
        "kvctl stats": json.loads(kvctl("stats", name, "--json")),
        "kvctl explain": json.loads(kvctl("explain", name, "--json")),
        "controller": instance_memory.row(name),
        "kvtop": {
            "state": "applied" if shown.state == "asleep" else shown.state,
            **{key: getattr(shown, key) for key in FIELDS if hasattr(shown, key)},
        },
        "metrics": {
            "state": states[0],
            **{key: samples.get(key) for key in FIELDS},
        },
    }


def devices_of(name: str) -> list[dict[str, object]]:
    """The rows of `kvctl devices` about one instance, one a device."""
    return [
        row
        for device in json.loads(kvctl("devices", "--json"))
        for row in device["instances"]
        if row["name"] == name
    ]


def reserved_on_the_device() -> dict[str, int]:
    """What each surface says that the group of this test has reserved."""
    group = f"surfaces-{os.getpid()}"
    infos = [info for info in ledger.list_ledgers() if info.group == group]
    (shown,) = scene_of([], infos, 0.0).devices
    of_group = [one for one in instance_memory.devices() if one["group"] == group]
    return {"controller": of_group[0]["reserved_bytes"], "kvtop": shown.reserved_bytes}


PARTS = ("in_use_bytes", "cached_bytes", "parked_bytes", "slack_bytes")


def test_device_rows_match_instance_memory(instance: Instance) -> None:
    ids = instance.alloc(40)
    assert ids
    instance.cache(ids[::2])  # not one whole page that others could have
    row = instance_memory.row(instance.name)
    group = f"surfaces-{os.getpid()}"
    infos = [info for info in ledger.list_ledgers() if info.group == group]
    scene = scene_of(segment.list_segments(), infos, 0.0, [instance.name])
    (shown,), (device,) = scene.instances, scene.devices
    (member,) = next(one for one in instance_memory.devices() if one["group"] == group)["members"]
    assert row["cached_bytes"] == 20 * PAGE_BYTES // BLOCKS_PER_PAGE
    assert member["evictable_bytes"] == 0
    for part in PARTS:
        assert getattr(shown, part) == getattr(device, part) == row[part] == member[part], part
    assert device.held_bytes == row["mapped_bytes"] == member["mapped_bytes"]


def assert_all_agree(name: str, state: str) -> dict[str, object]:
    said = surfaces(name)
    listed = said["kvctl list"]
    assert listed["state"] == state
    for surface, facts in said.items():
        assert facts["state"] == state, surface
        for key in FIELDS:
            if key in facts:
                assert facts[key] == listed[key], (surface, key)
    return listed


@pytest.fixture
def instance() -> Iterator[Instance]:
    group = f"surfaces-{os.getpid()}"
    with Instance(
        KVELASTIC_HOST_MEMORY="64M",
        KVELASTIC_LEDGER=group,
        KVELASTIC_PAGE_PREALLOC_ENABLED="false",  # nothing moves while it is compared
        KVELASTIC_RESERVE="6M",
    ) as one:
        yield one


def test_surfaces_agree_while_running_shrinking_and_asleep(instance: Instance) -> None:
    name = instance.name
    assert instance.alloc(40)  # ten pages, and none of them parked
    before = assert_all_agree(name, "applied")
    assert before["is_limited"] is False
    assert before["reserved_bytes"] == 6 << 20
    (on_device,) = devices_of(name)
    assert on_device["reserved_bytes"] == 6 << 20
    assert reserved_on_the_device() == {"controller": 6 << 20, "kvtop": 6 << 20}
    # Not a whole number of pages: what was set and what is kept to are two figures everywhere.
    odd_bytes = 8 * PAGE_BYTES - 4096
    until_replied(name, limit_bytes=odd_bytes)
    limited = assert_all_agree(name, "shrinking")
    assert limited["limit_bytes"] == odd_bytes
    assert limited["effective_limit_bytes"] == 7 * PAGE_BYTES
    until_replied(name, limit_bytes=PAGE_BYTES)
    assert_all_agree(name, "shrinking")
    until_replied(name, limit_bytes=UNLIMITED_BYTES, asleep=True)
    asleep = assert_all_agree(name, "shrinking")
    assert (asleep["asleep"], asleep["limit_bytes"]) == (True, 64 << 20)
    assert asleep["reserved_bytes"] == 6 << 20  # when it wakes; of its device it has nothing now
    assert set(reserved_on_the_device().values()) == {0}
    segment.request(name, asleep=False, wait_s=DEADLINE_S)
    assert_all_agree(name, "applied")


@pytest.mark.parametrize(
    ("mode", "verdict"),
    [("refuse", "refused"), ("mute", "pending"), ("shrink", "shrinking"), ("apply", "applied")],
)
def test_surfaces_agree_on_request_verdict(mode: str, verdict: str) -> None:
    request = Request(limit_bytes=32 << 20)
    with Owner(f"surfaces_{mode}_{os.getpid()}", mode) as owner:
        if mode == "shrink":
            until_replied(owner.name, limit_bytes=request.limit_bytes)
        else:
            wait_s = DEADLINE_S if verdict in {"refused", "applied"} else 0
            answer = segment.request(owner.name, limit_bytes=request.limit_bytes, wait_s=wait_s)
        assert_all_agree(owner.name, verdict)
        if mode != "shrink":
            assert outcome_of(request, answer).verdict is Verdict(verdict)


def test_every_state_has_a_metric() -> None:
    assert {"applied", "shrinking", "refused", "failed", "pending", "unknown"} <= set(STATES)
