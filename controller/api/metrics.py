"""/metrics: the controller's metrics, collected on each request only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from kvelastic.controller.models.gate import State
from kvelastic.controller.models.traffic import bucket_bounds_s
from kvelastic.errors import LedgerError, SegmentError, is_out_of_descriptors
from kvelastic.instance.metric_table import table
from kvelastic.instance.metrics import KvelasticCollector, family
from kvelastic.shared import ledger, segment

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState
    from kvelastic.controller.models.served_model import ServedModel

_EVERY = 8
"""Every eighth of the traffic's buckets is exported: 20 bounds, each about twice the previous."""

(_REQUESTS,) = table("", ("model", "outcome"), ("requests_total", "Requests that are over."))
(_STATE,) = table("", ("model", "state"), ("model_state", "1 for the state it is in."))
_OF_MODEL: Final = table(
    "",
    ("model",),
    ("generated_tokens_total", "Tokens that engines made.", "traffic.tokens"),
    ("in_flight", "Requests at engines.", "gate.in_flight"),
    ("queued", "Requests that wait.", "gate.queued"),
    ("wakes_total", "Times woken."),
    ("sleeps_total", "Times put to sleep."),
)
(_FALLBACKS,) = table(
    "",
    ("model", "reason"),
    ("prefill_fallbacks_total", "Requests whose prompts the prefill pool has not computed."),
)
(_INSTANCE,) = table("", ("model", "name"), ("model_instance", "1; the segment of a model."))
"""Joins a model with its memory metrics, `kvelastic_instance_*`."""
_OF_CONTROLLER: Final = table(
    "",
    (),
    ("unrouted_requests_total", "Requests that no model got.", "unrouted"),
    ("buffered_bytes", "Bodies that are held now.", "forwarder.budget.held_bytes"),
    ("log_dropped_lines_total", "Lines of the log that stderr did not take.", "log.dropped_lines"),
    ("connections", "Clients' connections.", "connections.open"),
    (
        "connections_limit",
        "Connections that are served at once, by the limit of open files.",
        "connections.most",
    ),
    ("log_followers", "Clients that follow an engine's log."),
    ("refused_connections_total", "Connections beyond that limit.", "connections.refused"),
    (
        "send_timeouts_total",
        "Connections cut because their clients took nothing of their answers.",
        "connections.cut",
    ),
    ("descriptor_shortages_total", "Times that no file descriptor was left.", "files.shortages"),
)
(_TASKS,) = table("", (), ("tasks", "Tasks of the event loop."))
"""Grows without bound if a task leaks."""


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
        """Yield every family, for every model."""
        models = list(self._app_state.fleet)
        yield from _traffic(models)
        yield family(
            _STATE,
            [
                ((model.name, state.value), model.reported_state is state)
                for model in models
                for state in State
            ],
        )
        for metric in _OF_MODEL:
            value = attrgetter(metric.field)
            yield family(metric, [((model.name,), value(model)) for model in models])
        fallbacks = [(model, model.prefill_fallbacks.items()) for model in models]
        yield family(
            _FALLBACKS, [((m.name, why), count) for m, counts in fallbacks for why, count in counts]
        )
        instances = [(model.name, model.instance) for model in models]
        yield family(_INSTANCE, [((name, of), 1) for name, of in instances if of is not None])
        yield from self._memory
        for metric in _OF_CONTROLLER:
            yield family(metric, [((), attrgetter(metric.field)(self._app_state))])
        yield family(_TASKS, [((), len(asyncio.all_tasks()))])


def _traffic(models: Iterable[ServedModel]) -> Iterable[Metric]:
    requests: list[tuple[tuple[str, str], int]] = []
    first = HistogramMetricFamily(
        "kvelastic_time_to_first_byte_seconds", "Until an answer began.", labels=["model"]
    )
    total = HistogramMetricFamily(
        "kvelastic_request_seconds", "Until an answer ended.", labels=["model"]
    )
    for model in models:
        traffic, name = model.traffic, model.name
        requests += [
            ((name, "ok"), traffic.succeeded),
            ((name, "engine_error"), traffic.failed - traffic.cancelled - traffic.refused),
            ((name, "cancelled"), traffic.cancelled),
            ((name, "refused"), traffic.refused),
        ]
        first.add_metric([name], _buckets(traffic.first_counts), traffic.first_sum_s)
        total.add_metric([name], _buckets(traffic.total_counts), traffic.total_sum_s)
    return family(_REQUESTS, requests), first, total


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
