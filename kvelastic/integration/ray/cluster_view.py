"""One view of all nodes, merged from the responses of the replicas' controllers: pure functions.

Every replica reports all instances of its machine, so one reply for each machine is used. Instances
without Ray are included. A machine without a reply is listed with its state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from kvelastic.instance import metric_table
from kvelastic.integration.ray.messages import Control

OK: Final = "ok"
NO_REPLY: Final = "no_reply"
"""Ray counts it as alive, and no replica replied in time or none runs there."""
DEAD: Final = "dead"
_OF_MACHINE: Final = frozenset(one.name.removesuffix("_total") for one in metric_table.METRICS)
"""Metrics of all instances of a machine; the others are of one replica's controller."""


def merged_memory(replies: Iterable[Control], nodes: Mapping[str, bool]) -> dict[str, Any]:
    """Return `GET /memory` of all machines, in the form of one controller's, with `nodes`.

    `nodes` tells whether each machine is alive. `models` has replicas' names in place of models'.
    """
    replies = sorted(replies, key=lambda reply: reply.replica)
    rows: dict[str, list[dict[str, Any]]] = {}
    devices: list[dict[str, Any]] = []
    for reply in replies:
        if reply.node in rows:
            continue
        found = json.loads(reply.body)
        rows[reply.node] = [{**row, "node": reply.node} for row in found["instances"]]
        devices += [{**device, "node": reply.node} for device in found["devices"]]
    by_place = {(node, row["name"]): row for node in rows for row in rows[node]}
    return {
        "models": {each.replica: by_place.get((each.node, each.instance)) for each in replies},
        "instances": [row for node in sorted(rows) for row in rows[node]],
        "devices": devices,
        "nodes": [
            {"node": node, "state": state} for node, state in sorted(_states(rows, nodes).items())
        ],
    }


def merged_metrics(replies: Iterable[Control], nodes: Mapping[str, bool]) -> bytes:
    """Return `GET /metrics` of all machines, with the label `node`.

    Metrics of a replica's own controller have the label `replica` too. Blocks for milliseconds.
    """
    families: dict[str, Metric] = {}
    seen: set[str] = set()
    for reply in sorted(replies, key=lambda reply: reply.replica):
        is_first = reply.node not in seen
        seen.add(reply.node)
        for family in text_string_to_metric_families(reply.body.decode()):
            labels = {"node": reply.node}
            if family.name not in _OF_MACHINE:
                labels["replica"] = reply.replica
            elif not is_first:
                continue
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            merged.samples += [
                sample._replace(labels={**labels, **sample.labels}) for sample in family.samples
            ]
    up = GaugeMetricFamily(
        "kvelastic_node_up", "1 if a replica of the machine replied.", labels=["node"]
    )
    for node, state in _states(seen, nodes).items():
        up.add_metric([node], float(state == OK))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([*families.values(), up]))
    return generate_latest(registry)


def _states(replied: Iterable[str], nodes: Mapping[str, bool]) -> dict[str, str]:
    states = {node: NO_REPLY if is_alive else DEAD for node, is_alive in nodes.items()}
    return states | dict.fromkeys(replied, OK)


class _Families:
    """A collector of finished families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families
