"""Prometheus metrics of instances, tiers, links and ledgers.

    registry.register(KvelasticCollector(list_segments, list_ledgers))   # reads at each scrape

Needs prometheus-client (`pip install 'kvelastic[metrics]'`), which implements the text format.
Other programs that serve metrics can register the collector. `python -m kvelastic.instance.metrics`
prints docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvelastic.instance import metric_table
from kvelastic.instance.row import printable
from kvelastic.instance.status import status_of
from kvelastic.shared import link_status
from kvelastic.shared.ledger_facts import LedgerInfo
from kvelastic.shared.link_status import NodeStatus
from kvelastic.shared.segment_listing import SegmentInfo
from kvelastic.shared.tier_status import TiersStatus, tiers_of


class KvelasticCollector(Collector):
    """Reads segments, tiers, nodes and ledgers at each scrape of a registry.

    `find_segments` and `find_ledgers` are `segment.list_segments` and `ledger.list_ledgers`.
    """

    def __init__(
        self,
        find_segments: Callable[[], Sequence[SegmentInfo]],
        find_ledgers: Callable[[], Sequence[LedgerInfo]],
    ) -> None:
        self._find_segments = find_segments
        self._find_ledgers = find_ledgers

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics."""
        segments = self._find_segments()
        return families(segments, self._find_ledgers(), tiers_of(segments), link_status.nodes())


def families(
    segments: Sequence[SegmentInfo],
    ledgers: Sequence[LedgerInfo],
    all_shown: Mapping[str, TiersStatus],
    nodes: Sequence[NodeStatus],
) -> Iterable[Metric]:
    """Return the metrics as prometheus-client objects, in the order of `metric_table.METRICS`.

    `all_shown` maps segment names to their tiers. A dead or unreadable instance has no metrics, but
    is counted in `kvelastic_segments`.
    """
    drawn = _Drawn()
    for info in segments:
        if info.is_alive and info.header:
            _add_instance(drawn, info)
    for name, shown in all_shown.items():
        _add_tiers(drawn, name, shown)
    for node in nodes:
        _add_node(drawn, node)
    readable = [ledger for ledger in ledgers if ledger.status == "readable"]
    for ledger in readable:
        labels = (ledger.device, ledger.group)
        drawn.add_all(metric_table.DEVICE, labels, ledger)
        _add_members(drawn, ledger, segments)
    for status in metric_table.STATUSES:
        drawn.add(metric_table.SEGMENTS, (status,), sum(info.status == status for info in segments))
    drawn.add(metric_table.UNREADABLE, (), len(ledgers) - len(readable))
    return drawn.families()


def _add_instance(drawn: _Drawn, info: SegmentInfo) -> None:
    labels = _labels(info)
    status = status_of(info)
    drawn.add_all(metric_table.STATISTICS, labels, status)
    for use in status.uses:
        drawn.add(metric_table.ON_DEVICE, (labels[0], use.device, *labels[2:]), use.mapped_bytes)
    for described in metric_table.COUNTERS:
        drawn.add(described, labels, status.counters.get(described.field))
    for state in metric_table.STATES:
        drawn.add(metric_table.STATE, (*labels, state), int(state == status.state))
    drawn.add(metric_table.STARTED, labels, info.header["created_realtime_ns"] / 1e9)
    drawn.add(metric_table.INFO, (*labels, str(info.header["pid"]), info.header["uuid"].hex()), 1)


def _add_tiers(drawn: _Drawn, name: str, shown: TiersStatus) -> None:
    for tier in shown.tiers:
        drawn.add_all(metric_table.TIER, (name, tier.tier), tier)
    drawn.add_all(metric_table.TIERS, (name,), shown.blocks)


def _add_node(drawn: _Drawn, node: NodeStatus) -> None:
    labels = (str(node.node_id), str(node.pid), node.role)
    drawn.add_all(metric_table.NODE, labels, node)
    # A peer may have several ended links. Only the latest link of each peer is exported.
    for link in sorted(node.links, key=lambda link: link.number, reverse=True):
        drawn.add_all(metric_table.LINK, (*labels, str(link.peer_id)), link)


def _add_members(drawn: _Drawn, ledger: LedgerInfo, segments: Sequence[SegmentInfo]) -> None:
    by_uuid = {info.header["uuid"]: info for info in segments if info.header}
    for member in ledger.members:
        info = by_uuid.get(member.uuid)
        if member.status == "dead" or (info is not None and info.status == "dead"):
            continue
        # A member whose segment name was removed still holds memory.
        header = info.header if info else {"engine": "", "model": ""}
        name = info.name if info else member.name
        labels = (name, ledger.device, header["engine"], header["model"])
        drawn.add_all(metric_table.MEMBER, labels, member)


def _labels(info: SegmentInfo) -> tuple[str, ...]:
    header = info.header
    return (info.name, header["device"], header["engine"], header["model"])


class _Drawn:
    """Samples by metric, each series once: Prometheus drops a scrape with duplicate series."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[tuple[str, ...], float]] = {}

    def add_all(self, table: metric_table.Table, labels: Sequence[str], of: object) -> None:
        for described in table:
            value: metric_table.Value = getattr(of, described.field)
            self.add(described, labels, value)

    def add(
        self, described: metric_table.Described, labels: Sequence[str], value: metric_table.Value
    ) -> None:
        if value is not None:
            # Names and models come from other processes. A file name may not be valid UTF-8, but
            # the format requires it.
            texts = tuple(printable(label) for label in labels)
            self._samples.setdefault(described.name, {}).setdefault(texts, value)

    def families(self) -> Iterator[Metric]:
        for described in metric_table.METRICS:
            samples = self._samples.get(described.name)
            if samples:
                yield family(described, samples.items())


def family(
    described: metric_table.Described, samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return a metric with these samples: values of labels, and the value."""
    make = CounterMetricFamily if described.kind == "counter" else GaugeMetricFamily
    found = make(described.name, described.help, labels=described.labels)
    for labels, value in samples:
        found.add_metric(labels, value)
    return found


_INTRODUCTION: Final = """\
# Metrics

Prometheus metrics of instances, devices, tiers and links ([kvctl.md](kvctl.md#metrics)):

    kvctl metrics --listen 127.0.0.1:9464

[grafana/kvelastic.json](grafana/kvelastic.json) is a dashboard of them.
`kvelastic.instance.metrics.KvelasticCollector` adds them to another program's metrics, and
`python -m kvelastic.instance.metrics` prints this page.

- Units are bytes and seconds. `_total` counts since the start of the instance.
- `name` is the segment's name, as in kvctl. (`instance` is Prometheus' own label.)
- Metrics of a device, and of granted, reserved, asked and wanted memory, need a ledger. An instance
  on several devices has these and `kvelastic_instance_device_mapped_bytes` for each device. Its
  other metrics are sums, with the first device's name.
- `tier` is the tier's name in `kvctl tiers`; `node` and `peer` are ids, as in `kvctl links`.

| metric | kind | labels | meaning |
|---|---|---|---|
"""


def document() -> str:
    """Return the text of docs/metrics.md, generated from `metric_table`."""
    rows = []
    for one in metric_table.METRICS:
        labels = ", ".join(f"`{label}`" for label in one.labels) or "-"
        rows.append(f"| `{one.name}` | {one.kind} | {labels} | {one.help} |\n")
    return _INTRODUCTION + "".join(rows)


if __name__ == "__main__":
    print(document(), end="")
