"""/metrics, /openapi.json, logs; and requests made from the description, none of which may fail."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from prometheus_client.parser import text_string_to_metric_families
from running import Controller, Engine, config_for
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine: Engine) -> Iterator[Controller]:
    with Controller(config_for(engine, model={"aliases": ["a/b"]})) as front:
        yield front


def samples(front: Controller) -> dict[tuple[str, ...], float]:
    text = front.get("/metrics").text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_requests_sleeps_and_wakes(engine: Engine) -> None:
    with Controller(config_for(engine)) as front:
        front.complete(max_tokens=9)
        front.complete(fake={"status": 500})
        front.complete("nobody")
        front.post("/action/sleep/m")
        front.post("/action/wakeup/m")

        wait_until(lambda: samples(front)["kvelastic_requests_total", "m", "engine_error"] == 1)
        found = samples(front)
        assert found["kvelastic_requests_total", "m", "ok"] == 1
        assert found["kvelastic_generated_tokens_total", "m"] == 9
        assert found["kvelastic_model_state", "m", "awake"] == 1
        assert found["kvelastic_sleeps_total", "m"] == found["kvelastic_wakes_total", "m"] == 1
        assert found["kvelastic_unrouted_requests_total",] == 1
        assert found["kvelastic_request_seconds_count", "m"] == 2
        assert found["kvelastic_request_seconds_bucket", "+Inf", "m"] == 2


def test_engine_failure_before_its_response_is_engine_error(engine: Engine) -> None:
    with Controller(config_for(engine)) as front:
        assert front.complete(fake={"reset": True}).status_code == 502
        wait_until(lambda: samples(front)["kvelastic_request_seconds_count", "m"] == 1)
        assert samples(front)["kvelastic_requests_total", "m", "engine_error"] == 1


def test_each_request_is_logged_as_one_json_line(front: Controller) -> None:
    trace = {"x-request-id": "abc-123"}
    front.post("/v1/completions", {"model": "m", "max_tokens": 3}, headers=trace)
    line = json.loads(front.wait_for_line("abc-123"))
    assert (line["kind"], line["status"], line["model"], line["tokens"]) == ("request", 200, "m", 3)
    refused = front.complete("nobody")
    line = json.loads(front.wait_for_line(refused.headers["x-request-id"]))
    assert (line["status"], line["error"]) == (404, "model_not_found")


def test_every_route_is_in_the_openapi_description(front: Controller) -> None:
    paths = front.get("/openapi.json").json()["paths"]
    for path in (
        "/health", "/models", "/health/{model}", "/traffic/stats", "/traffic/stats/{model}",
        "/models/idle", "/models/active", "/sleep/status", "/action/sleep/{model}",
        "/action/wakeup/{model}", "/sleep/candidates", "/memory", "/memory/{model}",
        "/memory/{model}/trim", "/memory/{model}/tiers/{tier}", "/memory/{model}/tiers/erase",
        "/devices", "/v1/models", "/v1/models/{model}", "/admin/reload",
        "/v1/completions", "/v1/chat/completions", "/metrics",
        "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/tags",
        "/api/ps", "/api/version", "/v1/realtime", "/upstream/{model}/{path}",
        "/models/{model}/logs",
    ):  # fmt: skip
        assert path in paths, path
    assert "/action/sleep/{model}" in front.get("/docs").text


def test_requests_from_openapi_description_cause_no_500(front: Controller) -> None:
    document = front.get("/openapi.json").json()
    for path in ("/admin/reload",):  # changes what the other tests of this module use
        del document["paths"][path]
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=front.url)
    made = 0

    for result in schema.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()

        @settings(max_examples=15, suppress_health_check=list(HealthCheck), database=None)
        def one(case: schemathesis.Case) -> None:
            nonlocal made
            made += 1
            case.call_and_validate(checks=[not_a_server_error], base_url=front.url)

        given(case=operation.as_strategy())(one)()
    assert made > 100
    assert front.get("/health").status_code == 200
