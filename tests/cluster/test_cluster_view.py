"""The views of all nodes, merged from what their replicas' controllers return."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvelastic.integration.ray.cluster_view import merged_memory, merged_metrics
from kvelastic.integration.ray.messages import Control

METRICS = """\
# HELP kvelastic_instance_mapped_bytes Mapped.
# TYPE kvelastic_instance_mapped_bytes gauge
kvelastic_instance_mapped_bytes{name="i"} 7.0
# HELP kvelastic_wakes_total Times woken.
# TYPE kvelastic_wakes_total counter
kvelastic_wakes_total{model="m"} 2.0
"""


def reply(replica: str, node: str, names: tuple[str, ...] = ()) -> Control:
    rows = [{"name": name, "limit_bytes": 5} for name in names]
    body = json.dumps({"models": {}, "instances": rows, "devices": [{"device": "host"}]})
    return Control(replica, f"ray-{replica}", 200, [], body.encode(), node)


def samples(text: bytes) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def memory(*replies: Control, **nodes: bool) -> dict[str, Any]:
    return merged_memory(replies, nodes)


def test_merged_view_lists_each_node_once() -> None:
    found = memory(
        reply("b", "n2", ("ray-b",)),
        reply("a", "n1", ("ray-a", "ray-c", "alone")),
        reply("c", "n1", ("ray-a", "ray-c", "alone")),
        n1=True,
        n2=True,
    )
    listed = [(row["node"], row["name"]) for row in found["instances"]]
    assert listed == [("n1", "ray-a"), ("n1", "ray-c"), ("n1", "alone"), ("n2", "ray-b")]
    assert {name: row["node"] for name, row in found["models"].items()} == {
        "a": "n1",
        "b": "n2",
        "c": "n1",
    }
    assert [each["node"] for each in found["devices"]] == ["n1", "n2"]
    assert found["nodes"] == [{"node": "n1", "state": "ok"}, {"node": "n2", "state": "ok"}]


def test_nodes_without_a_reply_show_their_state() -> None:
    found = memory(reply("a", "n1"), n1=True, n2=True, n3=False)
    assert [each["state"] for each in found["nodes"]] == ["ok", "no_reply", "dead"]
    assert found["models"] == {"a": None}
    nothing: dict[str, Any] = {
        "models": {},
        "no_reply": [],
        "instances": [],
        "devices": [],
        "nodes": [],
    }
    assert memory() == nothing


def test_replica_without_reply_is_marked_and_hides_none() -> None:
    silent = [{"replica": "b", "instance": "ray-b", "node": "n1"}, {"replica": "c"}]
    replies = [reply("a", "n1", ("ray-a", "ray-b"))]
    found = merged_memory(replies, {"n1": True}, silent)
    assert (list(found["models"]), found["no_reply"]) == (["a", "b", "c"], ["b", "c"])
    assert found["models"]["b"]["name"] == "ray-b"  # as the other replica there sees it
    assert found["models"]["c"] is None
    metrics = [Control("a", "ray-a", 200, [], METRICS.encode(), "n1")]
    up = merged_metrics(metrics, {"n1": True}, silent)
    for labels, value in (('node="n1",replica="a"', 1), ('node="n1",replica="b"', 0)):
        assert b"kvelastic_replica_up{%s} %d.0" % (labels.encode(), value) in up


def test_merged_metrics_have_node_and_replica_labels() -> None:
    replies = [
        Control(replica, "i", 200, [], METRICS.encode(), node)
        for replica, node in (("a", "n1"), ("b", "n1"), ("c", "n2"))
    ]
    text = merged_metrics(replies, {"n1": True, "n2": True, "n3": False})
    found = samples(text)
    assert found["kvelastic_instance_mapped_bytes"] == [
        {"node": "n1", "name": "i"},
        {"node": "n2", "name": "i"},
    ]
    assert [(labels["node"], labels["replica"]) for labels in found["kvelastic_wakes_total"]] == [
        ("n1", "a"),
        ("n1", "b"),
        ("n2", "c"),
    ]
    assert [labels["node"] for labels in found["kvelastic_node_up"]] == ["n1", "n2", "n3"]
    assert text.count(b"# TYPE kvelastic_instance_mapped_bytes ") == 1
