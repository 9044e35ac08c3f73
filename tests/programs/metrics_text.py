"""The metrics of given segments, ledgers, tiers and nodes in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from kvelastic.instance.metrics import families
from kvelastic.shared import link_status
from kvelastic.shared.ledger_facts import LedgerInfo
from kvelastic.shared.link_status import NodeStatus
from kvelastic.shared.segment_listing import SegmentInfo
from kvelastic.shared.tier_status import TiersStatus, tiers_of


class _Given(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def render(
    segments: Sequence[SegmentInfo],
    ledgers: Sequence[LedgerInfo],
    all_shown: Mapping[str, TiersStatus] | None = None,
    nodes: Sequence[NodeStatus] | None = None,
) -> str:
    """Return the text. Reads tiers and nodes if `all_shown` or `nodes` is not given."""
    tiers = tiers_of(segments) if all_shown is None else all_shown
    found = link_status.nodes() if nodes is None else nodes
    return generate_latest(_Given(families(segments, ledgers, tiers, found))).decode()
