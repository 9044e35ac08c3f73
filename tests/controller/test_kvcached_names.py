"""A model whose instance the configuration names as programs for kvcached do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ledger_instance import Instance
from prometheus_client.parser import text_string_to_metric_families
from running import Controller, Engine, config_for
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import segment

pytestmark = pytest.mark.slow

NAME = f"kvc-{os.getpid()}"
SEGMENT = f"{NAME}.kvelastic"
MEMORY = {
    "KVELASTIC_HOST_MEMORY": "64M",
    "KVELASTIC_LEDGER": NAME,
    "KVELASTIC_IDLE_TRIM_SECONDS": "-1",
}
BESIDE_KVCACHED = MEMORY | {"KVELASTIC_KVCACHED_SEGMENT": "true", "KVELASTIC_IPC_NAME": NAME}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("vllm", "m") as engine:
        yield engine


def test_reports_find_the_instance_beside_kvcached(engine: Engine) -> None:
    with (
        Instance(KVELASTIC_MIN="40M", **BESIDE_KVCACHED) as instance,
        Controller(config_for(engine, model={"instance": NAME})) as front,
    ):
        assert instance.name == SEGMENT
        told = front.get("/memory").json()
        assert told["models"]["m"]["name"] == SEGMENT
        (device,) = (one for one in told["devices"] if one["group"] == NAME)
        assert [one["model"] for one in device["members"]] == ["m"]

        def history() -> list[dict[str, Any]]:
            devices = front.get("/devices/history").json()["devices"]
            return [each for one in devices if one["group"] == NAME for each in one["instances"]]

        (held,) = wait_until(history)
        assert (held["name"], held["model"]) == (SEGMENT, "m")
        (joined,) = (
            sample.labels
            for family in text_string_to_metric_families(front.get("/metrics").text)
            for sample in family.samples
            if sample.name == "kvelastic_model_instance"
        )
        assert joined == {"model": "m", "name": SEGMENT}
        (running,) = front.get("/api/ps").json()["models"]
        assert running["size"] == 40 << 20


def test_pressure_suspends_the_instance_beside_kvcached(engine: Engine) -> None:
    sleep = {"auto": True, "idle_after": "1h", "check_every": "50ms", "pressure_after": 0}
    with (
        Instance(KVELASTIC_MIN="60M", **BESIDE_KVCACHED) as idle,
        Instance(**MEMORY) as hungry,
        Controller(config_for(engine, model={"instance": NAME}, sleep=sleep)) as front,
    ):
        ids = idle.alloc(4 * 28)
        assert ids
        idle.cache(ids)  # guaranteed: only sleep makes it give that back
        wait_until(lambda: hungry.alloc(4 * 8) or front.state("m") == "asleep")
        wait_until(lambda: front.state("m") == "asleep", "it does not fall asleep")


def test_instance_beside_kvcached_makes_room(engine: Engine) -> None:
    with (
        Engine("vllm", "other") as second,
        Instance(KVELASTIC_MIN="40M", **MEMORY) as other,
    ):
        segment.request(other.name, asleep=True, wait_s=DEADLINE_S)
        httpx.post(second.url + "/sleep?level=1", timeout=DEADLINE_S).raise_for_status()
        config = config_for(engine, second, swap={"min_awake": 0})
        for model, name in zip(config["models"], (NAME, other.name), strict=True):
            model["instance"] = name
        with Instance(KVELASTIC_MIN="40M", **BESIDE_KVCACHED), Controller(config) as front:
            assert [front.state(name) for name in ("m", "other")] == ["awake", "asleep"]
            assert front.complete("other").status_code == 200
            assert [front.state(name) for name in ("m", "other")] == ["asleep", "awake"]
