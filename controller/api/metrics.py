"""/metrics: the controller's metrics, collected on each request only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.requests import Request
from starlette.responses import Response

from kvelastic.controller.models.gate import State
from kvelastic.controller.models.traffic import bucket_bounds_s
from kvelastic.errors import LedgerError, SegmentError, is_out_of_descriptors
from kvelastic.instance.metrics import KvelasticCollector
from kvelastic.shared import ledger, segment

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

_EVERY = 8
"""Every eighth of the traffic's buckets is exported: 20 bounds, each about twice the previous."""


async def metrics(app_state: AppState, _: Request) -> Response:
    """Counters and gauges for Prometheus: the controller's own, and those of `kvctl metrics`."""
    try:
        memory = await asyncio.to_thread(
            lambda: list(KvelasticCollector(segment.list_segments, ledger.list_ledgers).collect())
        )
    except (SegmentError, LedgerError) as error:
        if not is_out_of_descriptors(error):
            raise
        app_state.files.note("reading segments for /metrics")
        memory = []  # absent instead of zero; `kvelastic_descriptor_shortages` has the cause
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(app_state, memory))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


class _Collector:
    def __init__(self, app_state: AppState, memory: list[Metric]) -> None:
        self._app_state = app_state
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        """All families, of all models."""
        yield from self._requests()
        yield from self._states()
        yield from self._instances()
        yield from self._memory
        app_state = self._app_state
        yield CounterMetricFamily(
            "kvelastic_unrouted_requests", "Requests that no model got.", value=app_state.unrouted
        )
        yield GaugeMetricFamily(
            "kvelastic_buffered_bytes",
            "Bodies that are held now.",
            value=app_state.forwarder.budget.held_bytes,
        )
        yield CounterMetricFamily(
            "kvelastic_log_dropped_lines",
            "Lines of the log that stderr did not take.",
            value=app_state.log.dropped_lines,
        )
        connections, files = app_state.connections, app_state.files
        yield GaugeMetricFamily(
            "kvelastic_connections", "Clients' connections.", value=connections.open
        )
        yield GaugeMetricFamily(
            "kvelastic_connections_limit",
            "Connections that are served at once, by the limit of open files.",
            value=connections.most,
        )
        yield GaugeMetricFamily(
            "kvelastic_log_followers",
            "Clients that follow an engine's log.",
            value=app_state.log_followers,
        )
        yield CounterMetricFamily(
            "kvelastic_refused_connections",
            "Connections beyond that limit.",
            value=connections.refused,
        )
        yield CounterMetricFamily(
            "kvelastic_send_timeouts",
            "Connections cut because their clients took nothing of their answers.",
            value=connections.cut,
        )
        yield CounterMetricFamily(
            "kvelastic_descriptor_shortages",
            "Times that no file descriptor was left.",
            value=files.shortages,
        )
        # Grows without bound if a task leaks.
        yield GaugeMetricFamily(
            "kvelastic_tasks", "Tasks of the event loop.", value=len(asyncio.all_tasks())
        )

    def _requests(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "kvelastic_requests", "Requests that are over.", labels=["model", "outcome"]
        )
        tokens = CounterMetricFamily(
            "kvelastic_generated_tokens", "Tokens that engines made.", labels=["model"]
        )
        first = HistogramMetricFamily(
            "kvelastic_time_to_first_byte_seconds", "Until an answer began.", labels=["model"]
        )
        total = HistogramMetricFamily(
            "kvelastic_request_seconds", "Until an answer ended.", labels=["model"]
        )
        for model in self._app_state.fleet:
            traffic, name = model.traffic, model.name
            failed = traffic.failed - traffic.cancelled - traffic.refused
            for outcome, count in (
                ("ok", traffic.succeeded),
                ("engine_error", failed),
                ("cancelled", traffic.cancelled),
                ("refused", traffic.refused),
            ):
                requests.add_metric([name, outcome], count)
            tokens.add_metric([name], traffic.tokens)
            first.add_metric([name], _buckets(traffic.first_counts), traffic.first_sum_s)
            total.add_metric([name], _buckets(traffic.total_counts), traffic.total_sum_s)
        return requests, tokens, first, total

    def _states(self) -> Iterable[Metric]:
        state = GaugeMetricFamily(
            "kvelastic_model_state", "1 for the state it is in.", labels=["model", "state"]
        )
        in_flight = GaugeMetricFamily(
            "kvelastic_in_flight", "Requests at engines.", labels=["model"]
        )
        queued = GaugeMetricFamily("kvelastic_queued", "Requests that wait.", labels=["model"])
        wakes = CounterMetricFamily("kvelastic_wakes", "Times woken.", labels=["model"])
        sleeps = CounterMetricFamily("kvelastic_sleeps", "Times put to sleep.", labels=["model"])
        fallbacks = CounterMetricFamily(
            "kvelastic_prefill_fallbacks",
            "Requests whose prompts the prefill pool has not computed.",
            labels=["model", "reason"],
        )
        for model in self._app_state.fleet:
            for each in State:
                state.add_metric([model.name, each.value], float(model.reported_state is each))
            in_flight.add_metric([model.name], model.gate.in_flight)
            queued.add_metric([model.name], model.gate.queued)
            wakes.add_metric([model.name], model.wakes)
            sleeps.add_metric([model.name], model.sleeps)
            for reason, count in model.prefill_fallbacks.items():
                fallbacks.add_metric([model.name, reason], count)
        return state, in_flight, queued, wakes, sleeps, fallbacks

    def _instances(self) -> Iterable[Metric]:
        """Return the metric that joins a model with its memory metrics, `kvelastic_instance_*`."""
        instance = GaugeMetricFamily(
            "kvelastic_model_instance", "1; the segment of a model.", labels=["model", "name"]
        )
        for model in self._app_state.fleet:
            if model.settings.instance is not None:
                instance.add_metric([model.name, model.settings.instance], 1)
        return (instance,)


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus requires."""
    bounds = bucket_bounds_s()
    shown: list[tuple[str, float]] = []
    seen = 0
    for bucket, bound in enumerate(bounds):
        seen += counts[bucket]
        if bucket % _EVERY == 0:
            shown.append((f"{bound:.6g}", seen))
    shown.append(("+Inf", sum(counts)))
    return shown
