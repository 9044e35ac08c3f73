"""Pure functions that merge the replies of the replicas' controllers into one view of the cluster.

Every replica reports every instance on its machine, including instances without Ray. So one reply
for each machine is enough. Machines and replicas without a reply are listed with their state.
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
"""Ray counts the machine as alive, but no replica there replied in time, or none runs there."""
DEAD: Final = "dead"
_OF_MACHINE: Final = frozenset(one.name.removesuffix("_total") for one in metric_table.METRICS)
"""Metrics that cover a whole machine. The others describe one replica's controller."""


def merged_memory(
    replies: Iterable[Control], nodes: Mapping[str, bool], silent: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the body of `GET /memory` for the cluster.

    It has the fields of one controller's body, and `nodes` with each machine's state. `models` is
    keyed by the name of the replica instead of the model, and `no_reply` lists those that did not
    reply. The parameter `nodes` maps each machine to True if Ray counts it as alive, and `silent`
    has the last reports of the replicas that did not reply.
    """
    replies = sorted(replies, key=lambda reply: reply.replica)
    rows: dict[str, list[dict[str, Any]]] = {}
    devices: list[dict[str, Any]] = []
    for reply in replies:
        if reply.node in rows:
            continue
        found = json.loads(reply.body)
        rows[reply.node] = [{**row, "node": reply.node} for row in found["instances"]]
        for device in found["devices"]:  # a reply knows the model of its own instance only
            members = [{**member, "model": None} for member in device.get("members", [])]
            devices.append({**device, "members": members, "node": reply.node})
    by_place: dict[tuple[Any, Any], dict[str, Any]] = {
        (node, row["name"]): row for node in rows for row in rows[node]
    }
    # The instance of a silent replica is in the reply of another replica on its machine.
    silent_replicas = {one["replica"]: (one.get("node"), one.get("instance")) for one in silent}
    owners = {each.replica: (each.node, each.instance) for each in replies} | silent_replicas
    return {
        "models": {name: by_place.get(place) for name, place in owners.items()},
        "no_reply": sorted(silent_replicas),
        "instances": [row for node in sorted(rows) for row in rows[node]],
        "devices": devices,
        "nodes": [
            {"node": node, "state": state} for node, state in sorted(_states(rows, nodes).items())
        ],
    }


def merged_metrics(
    replies: Iterable[Control], nodes: Mapping[str, bool], silent: Iterable[Mapping[str, Any]] = ()
) -> bytes:
    """Return the body of `GET /metrics` for the cluster. Takes milliseconds.

    Every metric has the label `node`. Metrics of a replica's own controller also have `replica`.
    The parameters are those of `merged_memory`.
    """
    replies = sorted(replies, key=lambda reply: reply.replica)
    families: dict[str, Metric] = {}
    seen: set[str] = set()
    for reply in replies:
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
    replica_up = GaugeMetricFamily(
        "kvelastic_replica_up", "1 if the replica replied.", labels=["node", "replica"]
    )
    for reply in replies:
        replica_up.add_metric([reply.node, reply.replica], 1.0)
    for one in silent:
        replica_up.add_metric([one.get("node", ""), one["replica"]], 0.0)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([*families.values(), up, replica_up]))
    return generate_latest(registry)


def _states(replied: Iterable[str], nodes: Mapping[str, bool]) -> dict[str, str]:
    states = {node: NO_REPLY if is_alive else DEAD for node, is_alive in nodes.items()}
    return states | dict.fromkeys(replied, OK)


class _Families:
    """A Prometheus collector that returns metric families made beforehand."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families, as `CollectorRegistry` requires."""
        return self._families
