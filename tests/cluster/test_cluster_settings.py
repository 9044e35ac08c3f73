"""The configuration of a Serve application: what is refused, and what a replica makes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from kvelastic.errors import ClusterConfigError
from kvelastic.integration.ray.replica import instance_name
from kvelastic.integration.ray.settings import parse
from kvelastic.shared.segment import check_name

EXAMPLES = Path(__file__).parents[2] / "examples"
CHAT = {"name": "chat", "command": ["vllm", "serve", "m", "--port", "{port}"]}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "models: is missing"),
        ({"models": []}, "models"),
        ({"models": [{"name": "chat"}]}, "models.0.command"),
        (
            {"models": [{**CHAT, "replica": 2}]},
            "models.0.replica: there is no such key here; is replicas meant?",
        ),
        ({"models": [CHAT, CHAT]}, "two models are named 'chat'"),
        ({"models": [{**CHAT, "guarantee": "much"}]}, "this is no size"),
        (
            {"models": [{**CHAT, "replicas": 3, "autoscale": {"most_replicas": 2}}]},
            "autoscale.most_replicas is 2, and replicas, the minimum, is 3",
        ),
        ({"models": [CHAT], "report_every": 0}, "report_every"),
    ],
)
def test_configuration_errors_name_the_fault(raw: dict[str, object], said: str) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        parse(raw)
    assert said in str(caught.value)


def test_example_is_valid() -> None:
    whole = yaml.safe_load((EXAMPLES / "cluster.yaml").read_text())
    (application,) = whole["applications"]
    assert [model.placed_mib for model in parse(application["args"]).models] == [21504, 20480]


def test_replica_placement_size_is_guarantee_plus_reserved() -> None:
    (model,) = parse({"models": [{**CHAT, "guarantee": "512M", "reserved": "1K"}]}).models
    assert model.placed_mib == 513


def test_replica_settings_launch_one_model() -> None:
    model = {**CHAT, "guarantee": "64M", "limit": "128M", "env": {"A": "b"}}
    settings = parse({"models": [model]}).of_replica("chat", "ray-chat-1", 8000)
    (own,) = settings.models
    assert own.launch is not None
    assert own.launch.command[2:] == (
        "kvelastic.integration.ray.launcher",
        str(os.getpid()),
        *CHAT["command"],
    )
    assert own.launch.env == {"KVELASTIC_MIN": str(64 << 20), "A": "b"}
    assert not own.launch.restart
    assert (own.memory.min, own.memory.limit) == (64 << 20, 128 << 20)
    assert own.instance == "ray-chat-1"


@pytest.mark.parametrize("model", ["chat", "Qwen/Qwen3-0.6B", "ä" * 256, "-"])
def test_every_model_name_gives_an_instance_name(model: str) -> None:
    assert check_name(instance_name(model, "0b1c2d3e"))
