"""The dashboard's data of all nodes, merged from what their replicas' controllers return."""

from __future__ import annotations

import json
from typing import Any

from kvelastic.integration.ray.dashboard_view import (
    merged_history,
    merged_links,
    merged_models,
    merged_traffic,
)
from kvelastic.integration.ray.messages import Control


def reply(replica: str, node: str, body: dict[str, Any]) -> Control:
    return Control(replica, f"ray-{replica}", 200, [], json.dumps(body).encode(), node)


def history(replica: str, node: str, at: list[float], held: list[int]) -> Control:
    instance = {"name": f"ray-{replica}", "model": "chat", "granted_bytes": held}
    device = {"device": "host", "group": "g", "capacity_bytes": held, "instances": [instance]}
    body = {"interval_seconds": 2.0, "first_sample": 7, "at": at, "devices": [device]}
    return reply(replica, node, body)


def test_replicas_are_rows_with_their_nodes() -> None:
    model = {"state": "awake", "instance": "i", "launched": True}
    replies = [
        reply(replica, node, {"models": {"chat": model}, "traffic_stats": {"chat": {"queued": 1}}})
        for replica, node in (("b", "n2"), ("a", "n1"))
    ]
    assert merged_models(replies) == {
        "models": {
            replica: {**model, "model": "chat", "node": node, "launched": False}
            for replica, node in (("a", "n1"), ("b", "n2"))
        }
    }
    assert merged_traffic(replies) == {"traffic_stats": {"a": {"queued": 1}, "b": {"queued": 1}}}


def test_links_of_a_machine_are_listed_once() -> None:
    replies = [
        reply(replica, node, {"nodes": [{"name": node}]})
        for replica, node in (("a", "n1"), ("b", "n1"), ("c", "n2"))
    ]
    assert merged_links(replies) == {"nodes": [{"name": "n1"}, {"name": "n2"}]}


def test_samples_of_one_time_have_one_number() -> None:
    found = merged_history(
        [
            history("a", "n1", [100.1, 102.1, 104.1, 106.1], [1, 2, 3, 4]),
            history("b", "n1", [100.1], [9]),
            history("c", "n2", [101.9, 105.8], [5, 6]),
        ]
    )
    assert (found["controller_started_at"], found["first_sample"]) == (0, 50)
    assert found["at"] == [100.0, 102.0, 104.0, 106.0]
    assert [
        (each["node"], each["device"], each["capacity_bytes"], each["instances"])
        for each in found["devices"]
    ] == [
        (node, "host", held, [{"name": name, "model": None, "granted_bytes": held}])
        for node, name, held in (
            ("n1", "ray-a", [1, 2, 3, 4]),
            ("n2", "ray-c", [None, 5, None, 6]),
        )
    ]


def test_slowest_machine_ends_the_history() -> None:
    replies = [history("a", "n1", [2.0, 4.0], [1, 2]), history("b", "n2", [2.0], [3])]
    assert merged_history(replies)["at"] == [2.0]


def test_history_without_samples_is_empty() -> None:
    for replies in ([], [history("a", "n1", [], [])]):
        found = merged_history(replies)
        assert (found["at"], found["devices"]) == ([], [])
