"""Tiers by REST: what /memory says of them, and requests to them, on an instance with a disk."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import Browser, expect
from ledger_instance import Instance as WithoutTiers
from running import Controller, Engine, config_for
from tiers_instance import DISK_BYTES, Instance
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import ledger, segment
from kvelastic.shared.status_file import requests_in
from kvelastic.shared.tier_status import KIND

pytestmark = pytest.mark.slow


MIB = 1 << 20


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("vllm", "org/m") as engine:
        yield engine


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    instance = Instance(tmp_path_factory.mktemp("tiers") / "disk")
    yield instance
    assert instance.end() == 0


@pytest.fixture(scope="module")
def front(engine: Engine, instance: Instance) -> Iterator[Controller]:
    with Controller(config_for(engine, model={"instance": instance.name})) as front:
        yield front


def disk(front: Controller) -> dict[str, Any]:
    """What the controller says of the only tier."""
    (tier,) = front.get("/memory/org%2Fm").json()["memory"]["tiers"]
    return dict(tier)


def answered(front: Controller, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = front.client.request(
        method, f"/memory/org%2Fm/tiers/{path}", json=body | {"wait": DEADLINE_S}
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()["answer"]
    assert (answer["state"], answer["reason"]) == ("done", "")
    return answer


WRONG: list[tuple[int, str, str, object]] = [
    (400, "PATCH", "disk", {}),
    (400, "PATCH", "disk", {"limit": None}),
    (400, "PATCH", "disk", {"limit": -1}),
    (400, "PATCH", "disk", {"limit": "0.5"}),
    (400, "PATCH", "disk", {"limit": "much"}),
    (400, "PATCH", "disk", {"limit": True}),
    (400, "PATCH", "disk", {"limit": 1 << 62}),
    (400, "PATCH", "disk", {"limits": 1}),
    (400, "PATCH", "disk", {"limit": 1, "wait": "1h"}),
    (400, "PATCH", "disk", {"limit": 1, "wait": 10**400}),
    (400, "PATCH", "disk", []),
    (404, "PATCH", "host", {"limit": 1}),
    (404, "PATCH", "d\u00ef%00sk", {"limit": 1}),
    (400, "POST", "disk/trim", {}),
    (400, "POST", "disk/trim", {"limit": 1}),
    (404, "POST", "host/trim", {"size": 1}),
    (400, "POST", "clear", {"model": "m"}),
    (400, "POST", "erase", {}),
    (400, "POST", "erase", {"wait": 1}),
    (400, "POST", "erase", {"model": 3}),
    (400, "POST", "erase", {"model": ""}),
    (400, "POST", "erase", {"model": "m" * 257}),
    (400, "POST", "erase", {"model": "\ud800"}),
    (400, "POST", "erase", {"older_than": 0}),
    (400, "POST", "erase", {"older_than": "soon"}),
    (400, "POST", "erase", {"older_than": 7}),
    (400, "POST", "erase", {"older_than": "7"}),
]


def test_invalid_request_changes_nothing(front: Controller, instance: Instance) -> None:
    before = disk(front)
    for status, method, path, body in WRONG:
        response = front.client.request(
            method, f"/memory/org%2Fm/tiers/{path}", content=json.dumps(body)
        )
        assert response.status_code == status, (method, path, body, response.text)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert front.post("/memory/nobody/tiers/clear").status_code == 404
    after = disk(front)
    assert {**after, "is_current": True} == {**before, "is_current": True}


def test_tier_statistics_and_requests(front: Controller, instance: Instance) -> None:
    tier = disk(front)
    assert (tier["tier"], tier["state"], tier["limit_bytes"]) == ("disk", "ok", DISK_BYTES)
    assert tier["records"] == instance.records
    memory = front.get("/memory").json()["models"]["org/m"]
    assert (memory["tier_policy"], memory["tier_blocks"]["unmatched"] > 0) == ("write_back", True)

    assert answered(front, "POST", "verify", {})["records"] == {"disk": instance.records}
    trimmed = answered(front, "POST", "disk/trim", {"size": tier["used_bytes"] // 2})
    assert 0 < trimmed["records"]["disk"] <= instance.records // 2
    assert disk(front)["limit_bytes"] == DISK_BYTES
    limited = answered(front, "PATCH", "disk", {"limit": "1M"})
    assert 0 < limited["records"]["disk"] < trimmed["records"]["disk"]
    assert (disk(front)["limit_bytes"], disk(front)["used_bytes"] <= MIB) == (MIB, True)
    assert answered(front, "POST", "erase", {"older_than": "1h"})["records"] == {"disk": 0}
    erased = answered(front, "POST", "clear", {})
    assert erased["records"] == limited["records"]
    assert disk(front)["records"] == 0
    assert [audit(front, path)["asked"] for path in ("tiers/disk", "tiers/erase")] == [
        {"limit": MIB},
        {"model": None, "older_than": 3600.0},
    ]


def audit(front: Controller, path: str) -> dict[str, Any]:
    """The line about what was done there; others tell of what was refused."""

    def found() -> dict[str, Any] | None:
        lines = [json.loads(line) for line in list(front.lines) if f'/{path}"' in line]
        return next((line for line in lines if line.get("outcome") == "done"), None)

    line = wait_until(found)
    assert line is not None
    assert (line["kind"], line["model"]) == ("audit", "org/m")
    return line


def test_the_dashboard_shows_tiers(
    browser: Browser, front: Controller, instance: Instance, tmp_path: Path
) -> None:
    with browser.page(front.url) as page:
        table = page.row("org/m").get_by_role("table", name="Tiers of org/m")
        expect(table.locator("tbody tr")).to_have_count(1)
        expect(table.locator("tbody tr")).to_contain_text("disk")
        expect(table.locator("tbody tr")).to_contain_text("B of ")
        assert front.client.patch(
            "/memory/org%2Fm/tiers/disk", json={"limit": "30M", "wait": DEADLINE_S}
        ).is_success
        expect(table.locator("tbody tr")).to_contain_text(" of 30 MiB")

        def altered(route: Any) -> None:
            answer = front.get("/memory").json()
            row = answer["models"]["org/m"]
            one = row["tiers"][0] | {"hits": 4096, "misses": 17, "errors": 3, "state": "stuck"}
            folder = one | {"tier": "mooncake", "limit_bytes": None, "used_bytes": 3 << 30}
            row["tiers"] = [one, folder | {"errors": 0, "state": "ok"}]
            route.fulfill(json=answer)

        page.page.route("**/memory", altered)
        expect(table.locator("tbody tr").first).to_have_text(
            re.compile(r"disk stuck.+ of 30 MiB4096173")
        )
        expect(table.locator("tbody tr").last).to_have_text("mooncake 3 GiB4096170")
        assert table.locator("td.bad").all_inner_texts() == ["3"]
        for width in (1400, 700, 360):
            page.page.set_viewport_size({"width": width, "height": 900})
            assert not page.has_overflow(), width
            page.picture(tmp_path / f"{width}.png")
        assert (page.pale(), page.unnamed(), page.problems) == ([], [], [])


def test_stopped_instance_is_202_and_dead_instance_refused(engine: Engine, tmp_path: Path) -> None:
    instance = Instance(tmp_path / "disk")
    with Controller(config_for(engine, model={"instance": instance.name})) as front:
        instance.process.send_signal(signal.SIGSTOP)
        try:
            path = "/memory/org/m/tiers/disk"
            response = front.client.patch(path, json={"limit": "1M", "wait": 0})
        finally:
            instance.process.send_signal(signal.SIGCONT)
        assert response.status_code == 202
        assert response.json()["answer"] == {"state": "pending", "records": {}, "reason": ""}
        assert answered(front, "POST", "verify", {})["records"]["disk"] > 0
        assert disk(front)["limit_bytes"] == MIB  # what was asked before holds
        instance.process.kill()
        instance.end()
        response = front.client.patch(path, json={"limit": "2M"})
        assert response.status_code in {404, 409}
        assert response.json()["error"]["code"] in {"SEGMENT_NOT_FOUND", "SEGMENT_DEAD"}
    segment.reap()
    ledger.reap()


def test_waiting_tier_requests_do_not_block_others(engine: Engine, tmp_path: Path) -> None:
    """More of them than there are threads; and the controller ends while they wait."""
    instance = Instance(tmp_path / "disk")
    server = {"drain_timeout": 0.5}
    config = config_for(engine, model={"instance": instance.name}, server=server)
    with (
        contextlib.ExitStack() as at_the_end,
        Controller(config) as front,
        ThreadPoolExecutor(12) as clients,
    ):
        at_the_end.callback(instance.process.send_signal, signal.SIGCONT)
        instance.process.send_signal(signal.SIGSTOP)
        body = {"limit": "1M", "wait": 600}

        def ask() -> int:
            """Again where it was refused, as requests wait a second for each other at most."""
            url = f"{front.url}/memory/org/m/tiers/disk"
            with contextlib.suppress(httpx.HTTPError):
                while True:
                    answer = httpx.patch(url, json=body, timeout=DEADLINE_S)
                    if "SEGMENT_BUSY" not in answer.text:
                        return answer.status_code
            return 0

        waiting = [clients.submit(ask) for _ in range(12)]

        def asked() -> int:
            with instance.status_file.open("rb") as status_file:
                return len(requests_in(status_file.fileno(), KIND))

        wait_until(lambda: asked() == 12)
        assert front.get("/memory").status_code == 200
        assert front.end() == 0
        assert {one.result() for one in waiting} == {202}
    assert instance.end() == 0


def test_instance_without_tiers_is_404(engine: Engine) -> None:
    with (
        WithoutTiers(KVELASTIC_HOST_MEMORY="64M") as instance,
        Controller(config_for(engine, model={"instance": instance.name})) as front,
    ):
        assert front.get("/memory/org%2Fm").json()["memory"]["tiers"] == []
        response = front.client.patch("/memory/org/m/tiers/disk", json={"limit": "1M"})
        assert response.status_code == 404
        assert "KVELASTIC_TIERS" in response.json()["error"]["message"]
