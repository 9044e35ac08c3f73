"""The history of the devices' memory: its ring, against a plain list, and its route."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_instance import Instance
from running import Controller, Engine, config_for
from waiting import wait_until

from kvelastic.controller.models import memory_history
from kvelastic.controller.models.memory_history import SAMPLES, MemoryHistory
from kvelastic.errors import IntegrityError

pytestmark = pytest.mark.slow


MIB = 1 << 20


def device(name: str, instances: dict[str, int], status: str = "readable") -> dict[str, Any]:
    members = [
        {
            "name": n,
            "granted_bytes": b,
            "in_use_bytes": b,
            "cached_bytes": 0,
            "parked_bytes": 0,
            "pledged_bytes": b + 1,
        }
        for n, b in instances.items()
    ]
    return {
        "device": name, "group": "g", "status": status, "capacity_bytes": 100,
        "others_bytes": 0, "others_of_capacity_bytes": 0, "reserved_bytes": 7,
        "reserved_of_capacity_bytes": 5, "free_bytes": 100 - sum(instances.values()),
        "members": members,
    }  # fmt: skip


SAMPLE = st.dictionaries(
    st.sampled_from(["d0", "d1", "d2"]),
    st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 25)),
)


@settings(max_examples=60)
@given(samples=st.lists(SAMPLE, max_size=30), seconds=st.floats(0, 100))
def test_window_returns_the_added_samples(
    samples: list[dict[str, dict[str, int]]], seconds: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_history, "SAMPLES", 7)
        history = MemoryHistory()
        for number, sample in enumerate(samples):
            history.add(2.0 * number, [device(name, held) for name, held in sample.items()])
            history.check_integrity()
        now_s = 2.0 * len(samples)
        window = history.window(seconds, now_s=now_s, wall_s=now_s + 1000)
        kept = [n for n in range(len(samples))[-7:] if 2.0 * n >= now_s - seconds]
        assert window["at"] == [1000 + 2.0 * n for n in kept]
        if kept:
            assert window["first_sample"] == kept[0]
        shown = {
            (each["device"], instance["name"]): instance["granted_bytes"]
            for each in window["devices"]
            for instance in each["instances"]
        }
        wanted = {
            (name, instance): [samples[n].get(name, {}).get(instance) for n in kept]
            for n in kept
            for name in samples[n]
            for instance in samples[n][name]
        }
        assert shown == wanted


def test_history_size_is_bounded() -> None:
    history = MemoryHistory()
    for number in range(SAMPLES + 5):
        history.add(float(number), [device(f"d{number}", {f"i{number}": 1})])
    history.check_integrity()
    assert len(history.window(1e9, now_s=SAMPLES + 5.0, wall_s=0)["at"]) == SAMPLES
    many = [device(f"d{n}", {f"i{n}-{m}": 1 for m in range(60)}) for n in range(100)]
    for number in range(SAMPLES):
        history.add(1000.0 + number, many)
    history.check_integrity()
    assert len(history.window(1.0, now_s=1300.0, wall_s=0)["devices"]) <= 64


def test_duplicate_names_are_summed_and_unreadable_devices_skipped() -> None:
    history = MemoryHistory()
    both = device("d", {"a": 1})
    both["members"] = both["members"] * 2
    history.add(0.0, [both, device("foreign", {}, status="foreign")])
    (shown,) = history.window(10, now_s=0.0, wall_s=0.0)["devices"]
    assert shown["instances"][0]["granted_bytes"] == [2]
    assert shown["instances"][0]["pledged_bytes"] == [4]
    assert (shown["reserved_bytes"], shown["reserved_of_capacity_bytes"]) == ([7], [5])
    history.check_integrity()


def test_check_integrity_detects_decreasing_times() -> None:
    history = MemoryHistory()
    history.add(2.0, [])
    history.add(1.0, [])
    with pytest.raises(IntegrityError):
        history.check_integrity()


def test_memory_history_route() -> None:
    group = f"past-{os.getpid()}"
    with (
        Engine("vllm", "org/m") as engine,
        Instance(
            KVELASTIC_HOST_MEMORY="256M", KVELASTIC_LEDGER=group, KVELASTIC_RESERVE="48M"
        ) as instance,
        Controller(config_for(engine, model={"instance": instance.name})) as front,
    ):
        look_at_history(front, instance, group)


def look_at_history(front: Controller, instance: Instance, group: str) -> None:

    def shown() -> Any:
        answer = front.get("/devices/history?seconds=60").json()
        return next((d for d in answer["devices"] if d["group"] == group), None) and answer

    answer = wait_until(shown)
    one = next(d for d in answer["devices"] if d["group"] == group)
    assert set(one["capacity_bytes"]) <= {256 * MIB, None}
    (held,) = one["instances"]
    assert (held["name"], held["model"]) == (instance.name, "org/m")
    assert len(held["granted_bytes"]) == len(answer["at"]) > 0
    assert {48 * MIB} <= set(one["reserved_bytes"]) <= {48 * MIB, None}
    assert {48 * MIB} <= set(held["pledged_bytes"]) <= {48 * MIB, None}
    assert set(one["reserved_of_capacity_bytes"]) <= {0, None}  # the machine has more than 256M
    assert answer["interval_seconds"] == 2
    assert front.get("/devices/history?seconds=much").status_code == 400
    assert front.get("/devices/history?seconds=0").json()["devices"] == []
    assert "/devices/history" in front.get("/openapi.json").json()["paths"]
