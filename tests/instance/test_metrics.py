"""Metrics: the text, the document and the dashboard agree, and kvctl prints and serves them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from called_kvctl import kvctl
from metrics_text import render
from prometheus_client.parser import text_string_to_metric_families
from segment_owner import CAPACITY_BYTES, MAPPED_BYTES, Owner
from waiting import DEADLINE_S

from kvelastic.instance import metric_table, metrics
from kvelastic.shared.ledger_facts import LedgerInfo, Member
from kvelastic.shared.link_status import LinkStatus, NodeStatus
from kvelastic.shared.segment import SegmentInfo
from kvelastic.shared.tier_status import BlockCounts, TiersStatus, TierStatus

ROOT = Path(__file__).parents[2]
KVCTL = str(Path(sys.executable).with_name("kvctl"))
MIB = 1 << 20

USAGE = {
    "capacity_bytes": 1000 * MIB,
    "mapped_bytes": 100 * MIB,
    "in_use_bytes": 60 * MIB,
    "cached_bytes": 20 * MIB,
    "parked_bytes": 10 * MIB,
    "page_bytes": 2 * MIB,
    "blocks_total": 5000,
    "blocks_in_use": 300,
    "blocks_cached": 100,
    "asleep": 0,
    "limit_bytes": 500 * MIB,
    "under_pressure": 0,
    "blocks_available": 0,
    "blocks_reserved": 0,
    "reports_waiting": 1,
    "requests_waiting": 3,
    "first_needs_bytes": 600 * MIB,
    "first_may_need_bytes": 700 * MIB,
}
ACK = {
    "revision": 1,
    "state": "applied",
    "effective_limit_bytes": 500 * MIB,
    "over_bytes": 0,
    "min_bytes": 50 * MIB,
    "priority": -3,
    "reason": "",
}
tier_figures: Callable[..., TierStatus] = TierStatus
node_figures: Callable[..., NodeStatus] = NodeStatus
TIER = tier_figures("disk", "disk", *range(1, 17), is_stuck=False, is_current=True)
STATUS = TiersStatus(1, 0, "write_back", BlockCounts(*range(11)), (TIER,))
COUNTERS = {one.field: at + 1 for at, one in enumerate(metric_table.COUNTERS)}


def info(name: str = "one", status: str = "alive", **changes: dict[str, object]) -> SegmentInfo:
    header = {
        "uuid": name.encode("utf-8", "replace")[:16].ljust(16),
        "created_realtime_ns": 1_700_000_000_500_000_000,
        "device": "GPU-1",
        "devices": [("GPU-1", 1)],
        "engine": "vllm",
        "model": "Qwen/Qwen3-8B",
        "pid": 4711,
        "uid": 0,
    }
    return SegmentInfo(
        name,
        status,
        header=header | changes.get("header", {}),
        usage=dict(USAGE),
        ack=ACK | changes.get("ack", {}),
        request={"revision": 1, "limit_bytes": None} | changes.get("request", {}),
        counters=dict(COUNTERS),
        engine_asleep=False,
    )


def member(name: str = "one", **changes: object) -> Member:
    values: dict[str, object] = {
        "name": name,
        "uuid": name.encode().ljust(16),
        "pid": 4711,
        "status": "alive",
        "granted_bytes": 100 * MIB,
        "min_bytes": 50 * MIB,
        "limit_bytes": 500 * MIB,
        "priority": 0,
        "in_use_bytes": 0,
        "evictable_bytes": 0,
        "parked_bytes": 0,
        "page_bytes": 2 * MIB,
        "idle_s": 1.5,
        "ask_bytes": 4 * MIB,
        "ask_s": 0.25,
        "wanted_bytes": 0,
    }
    return Member(**(values | changes))  # type: ignore[arg-type]


LINK = LinkStatus(1, 8, "process 4712", "client", "memory", "linked", "", *range(1, 9))
NODE = node_figures(7, 4711, "PROMPT", (), 0, *range(1, 10), (LINK,))
LEDGER = LedgerInfo("GPU-1", "readable", "", "default", 1000 * MIB, 200 * MIB, (member(),))


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and the labels in the order of the alphabet, read by another hand than wrote them."""
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


ONE = "device=GPU-1,engine=vllm,model=Qwen/Qwen3-8B,name=one"


def test_waiting_requests_are_exported_if_engine_reports_them():
    found = samples(render([info()], [LEDGER]))
    assert found["kvelastic_instance_requests_waiting", ONE] == 3
    assert found["kvelastic_instance_first_needs_bytes", ONE] == 600 * MIB
    assert found["kvelastic_instance_limit_too_low", ONE] == 1
    before = info()
    for field in [name for name in before.usage if "waiting" in name or "first_" in name]:
        del before.usage[field]
    found = samples(render([before], [LEDGER]))
    assert ("kvelastic_instance_requests_waiting", ONE) not in found
    assert found["kvelastic_instance_limit_too_low", ONE] == 0


def test_instance_and_device_metrics():
    found = samples(render([info()], [LEDGER]))
    for name, value in {
        "capacity_bytes": 1000 * MIB,
        "mapped_bytes": 100 * MIB,
        "in_use_bytes": 60 * MIB,
        "cached_bytes": 20 * MIB,
        "parked_bytes": 10 * MIB,
        "limit_bytes": 500 * MIB,
        "min_bytes": 50 * MIB,
        "priority": -3,
        "granted_bytes": 100 * MIB,
        "asked_bytes": 4 * MIB,
        "asked_seconds": 0.25,
        "idle_seconds": 1.5,
        "start_time_seconds": 1_700_000_000.5,
        "pages_mapped_total": COUNTERS["pages_mapped"],
        "blocks_evicted_total": COUNTERS["blocks_evicted"],
    }.items():
        assert found[f"kvelastic_instance_{name}", ONE] == value, name
    for name, value in {
        "capacity_bytes": 1000 * MIB,
        "granted_bytes": 100 * MIB,
        "guaranteed_bytes": 50 * MIB,
        "others_bytes": 200 * MIB,
        "free_bytes": 700 * MIB,
        "asked_bytes": 4 * MIB,
        "instances": 1,
    }.items():
        assert found[f"kvelastic_device_{name}", "device=GPU-1,group=default"] == value, name


def test_sleeping_instance_exports_gauge_and_keeps_its_limit():
    """`asleep` is no state of the limit: what is still to be given back is told beside it."""
    sleeping = info(ack={"effective_limit_bytes": 0})
    sleeping.usage["asleep"] = 1
    found = samples(render([info("two"), sleeping], []))
    assert found["kvelastic_instance_asleep", ONE] == 1
    assert found["kvelastic_instance_asleep", ONE.replace("=one", "=two")] == 0
    assert found["kvelastic_instance_limit_bytes", ONE] == 500 * MIB
    assert found["kvelastic_instance_effective_limit_bytes", ONE] == 0
    assert found["kvelastic_instance_state", f"{ONE},state=applied"] == 1


def test_every_described_metric_is_exported_with_its_labels():
    families = {
        family.name: family
        for family in text_string_to_metric_families(
            render([info()], [LEDGER], {"one": STATUS}, [NODE])
        )
    }
    for one in metric_table.METRICS:
        family = families.pop(one.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (one.kind, one.help)
        for sample in family.samples:
            assert set(sample.labels) == set(one.labels), one.name
    assert families == {}


def test_metric_names_follow_prometheus_conventions():
    names = [one.name for one in metric_table.METRICS]
    assert len(set(names)) == len(names)
    for one in metric_table.METRICS:
        assert re.fullmatch(r"kvelastic_[a-z_]+", one.name)
        assert one.name.endswith("_total") == (one.kind == "counter")
        assert "instance" not in one.labels  # Prometheus' own


def test_every_instance_counter_has_a_metric():
    with Owner(f"metrics_{os.getpid()}_{random.randrange(1 << 40):x}") as owner:
        from kvelastic.shared import segment

        counted = {one.field for one in metric_table.COUNTERS}
        assert set(segment.inspect(owner.name).counters) == counted


@pytest.mark.parametrize(
    ("changes", "status", "state"),
    [
        ({}, "alive", "applied"),
        ({"ack": {"state": "shrinking"}}, "alive", "shrinking"),
        ({"ack": {"state": "refused"}}, "unknown", "unknown"),
        ({"ack": {"state": "failed"}}, "alive", "failed"),
        ({"ack": {"state": "none", "revision": 0}}, "alive", "pending"),
        ({"request": {"revision": 2}}, "alive", "pending"),
        ({}, "closing", "closing"),
    ],
)
def test_exactly_one_state_gauge_is_set(changes, status, state):
    found = samples(render([info(status=status, **changes)], []))
    states = {
        at: found["kvelastic_instance_state", f"{ONE},state={at}"] for at in metric_table.STATES
    }
    assert states == {at: float(at == state) for at in metric_table.STATES}
    assert found["kvelastic_segments", f"status={status}"] == 1


def test_dead_and_unreadable_segments_are_only_counted():
    broken = SegmentInfo("broken", "unreadable", problem="version 9")
    foreign = LedgerInfo("default_GPU-1", "foreign", problem="user 7")
    gone = LedgerInfo("GPU-1", "readable", members=(member("gone"), member("x", status="dead")))
    text = render([info("gone", status="dead"), broken], [foreign, gone])
    found = samples(text)
    assert found["kvelastic_segments", "status=dead"] == 1
    assert found["kvelastic_segments", "status=unreadable"] == 1
    assert found["kvelastic_ledgers_unreadable", ""] == 1
    assert "kvelastic_instance" not in text


def test_ledger_member_without_segment_is_exported():
    found = samples(render([], [LEDGER]))
    labels = "device=GPU-1,engine=,model=,name=one"
    assert found["kvelastic_instance_granted_bytes", labels] == 100 * MIB


def test_unusual_names_are_escaped_and_series_are_unique():
    """A label that is not escaped, or a series that comes twice, would cost the whole scrape."""
    strange = 'a"b\\c\nd{}\u2028é'
    undecodable = os.fsdecode(b"x\xff")
    found = samples(render([info(strange, header={"model": strange}), info(undecodable)], []))
    shown = 'a"b\\c\ufffdd{}\ufffdé'  # what steers a terminal is replaced: people read it with curl
    labels = f"device=GPU-1,engine=vllm,model={shown},name={shown}"
    assert found["kvelastic_instance_mapped_bytes", labels] == 100 * MIB
    twice = LedgerInfo("GPU-1", "readable", members=(member("a"), member("a")))
    text = render([], [twice, twice])
    assert text.count("kvelastic_instance_granted_bytes{") == 1
    assert text.count("kvelastic_device_capacity_bytes{") == 1


def test_metrics_document_is_up_to_date():
    written = (ROOT / "docs" / "metrics.md").read_text()
    assert written == metrics.document(), "python -m kvelastic.instance.metrics >docs/metrics.md"


# ---------------------------------------------------------------------------------- dashboard


def test_dashboard_uses_only_existing_metrics_and_labels():
    text = (ROOT / "docs" / "grafana" / "kvelastic.json").read_text()
    dashboard = json.loads(text)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    by_name = {one.name: one for one in metric_table.METRICS}
    used = set()
    for panel in panels:
        for target in panel.get("targets", []):
            expression = target["expr"]
            found = re.findall(r"(kvelastic_\w+)(?:\{([^}]*)\})?", expression)
            assert found, expression
            for name, selector in found:
                assert name in by_name, name
                used.add(name)
                labels = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", selector)
                assert set(labels) <= set(by_name[name].labels), expression
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert any(label in by_name[name].labels for name, _ in found), expression
    for variable in dashboard["templating"]["list"]:
        query = variable.get("query")
        if isinstance(query, dict):
            name, label = re.fullmatch(
                r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query["query"]
            ).groups()
            assert label in by_name[name].labels
    assert len(used) > 15
    # What an operator asks of tiers first: how full, of use, at what cost, and whether they fail.
    assert {"kvelastic_link_pulled_bytes_total", "kvelastic_link_failures_total"} <= used
    wanted = ("used_bytes", "limit_bytes", "hits_total", "misses_total", "errors_total", "stuck")
    assert {f"kvelastic_tier_{name}" for name in wanted} <= used


def test_dashboard_panels_do_not_overlap():
    panels = json.loads((ROOT / "docs" / "grafana" / "kvelastic.json").read_text())["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        of_it = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not of_it & cells, panel["title"]
        assert max(x for x, _ in of_it) < 24
        cells |= of_it
    rows = {panel["title"]: panel["gridPos"]["y"] for panel in panels if panel["type"] == "row"}
    assert list(rows) == sorted(rows, key=lambda title: rows[title])
    assert "Tiers" in rows


# ------------------------------------------------------------------------------- the command


@pytest.fixture
def owner():
    with Owner(f"metrics_{os.getpid()}_{random.randrange(1 << 40):x}") as running:
        yield running


def test_kvctl_metrics_prints_once(owner):
    result = kvctl("metrics")
    assert result.exit_code == 0
    labels = f"device=host,engine=test,model=none,name={owner.name}"
    found = samples(result.stdout)
    assert found["kvelastic_instance_mapped_bytes", labels] == MAPPED_BYTES
    assert found["kvelastic_instance_limit_bytes", labels] == CAPACITY_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "ending"), [("127.0.0.1:0", signal.SIGINT), ("0", signal.SIGTERM)]
)
def test_listen_serves_metrics_until_a_signal(owner, address, ending):
    serving = subprocess.Popen(
        [KVCTL, "metrics", "--listen", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = serving.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/metrics", said)[0]

        def scrape() -> str:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
                assert response.headers["Content-Type"].startswith("text/plain; version=")
                return response.read().decode()

        assert owner.name in scrape()
        for elsewhere in ("/", "/metrics/", "/favicon.ico", "/metricsx"):
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(url.replace("/metrics", elsewhere), timeout=DEADLINE_S)
            refused.value.close()
        owner.kill()
        assert owner.name not in scrape()  # each request is a fresh look
        serving.send_signal(ending)
        _, errors = serving.communicate(timeout=DEADLINE_S)
        assert (serving.returncode, errors) == (0, "")
    finally:
        serving.kill()
        serving.wait()
        serving.stdout.close()
        serving.stderr.close()


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0", "localhost.evil:0"]
)
def test_public_address_needs_the_public_option(address):
    result = kvctl("metrics", "--listen", address)
    assert result.exit_code == 2
    assert "--public" in result.stderr


@pytest.mark.parametrize(
    "address", ["", "x", "127.0.0.1", "127.0.0.1:x", "1:65536", "::1:80", ":-1"]
)
def test_invalid_listen_address_exits_2(address):
    result = kvctl("metrics", "--listen", address)
    assert result.exit_code == 2
    assert "127.0.0.1:9464" in result.stderr


def test_address_in_use_is_reported_without_traceback():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [KVCTL, "metrics", "--listen", f"127.0.0.1:{port}"], capture_output=True, text=True
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_prometheus_client_names_the_install_command():
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from kvelastic.cli.kvctl import main\n"
        "main(['metrics'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'kvelastic[metrics]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_collector_works_in_another_registry():
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(metrics.KvelasticCollector(lambda: [info()], lambda: [LEDGER]))
    assert generate_latest(registry).decode() == render([info()], [LEDGER])
