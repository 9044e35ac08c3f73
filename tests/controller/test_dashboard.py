"""The dashboard in a real browser, on the real controller, fake engines and a real instance."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from browser import Browser, Scheme, Shown, expect
from ledger_instance import PAGE_BYTES, Instance
from playwright.sync_api import Route
from ports import free_port
from running import FAKES, Controller, Engine, config_for
from waiting import DEADLINE_S, wait_until

from kvelastic.messages import parse_address
from kvelastic.transfer import Node

pytestmark = pytest.mark.slow


MIB = 1 << 20
HOSTILE = "<img src=x onerror=\"document.title='owned'\">&amp;<b>bold"
COUNT = "document.querySelectorAll('#rows > tr').length == {}"


# --------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine]]:
    with Engine("vllm", "org/m") as engine:
        yield (engine,)


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    with Instance(KVELASTIC_HOST_MEMORY="256M", KVELASTIC_LEDGER=f"web-{os.getpid()}") as instance:
        yield instance


@pytest.fixture(scope="module")
def front(
    engines: tuple[Engine], instance: Instance, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Controller]:
    """One engine that runs already, and one that the controller launches."""
    config = config_for(*engines)
    config["models"][0] |= {"instance": instance.name, "aliases": ["short"]}
    command = [sys.executable, str(FAKES / "engine.py"), "--kind=openai", f"--model={HOSTILE}"]
    launch = {
        "command": [*command, "--port={port}"],
        "port": free_port(),
        "log_file": str(tmp_path_factory.mktemp("engine") / "log"),
    }
    config["models"].append({"name": HOSTILE, "engine": "openai", "launch": launch})
    with Controller(config) as front:
        wait_until(lambda: front.state(HOSTILE) == "awake")
        yield front


@pytest.fixture
def engine(engines: tuple[Engine], front: Controller) -> Engine:
    """The first one, awake and with all of its device, whatever the last test did."""
    engines[0].reset()
    assert front.post("/action/wakeup/org/m").status_code == 200
    engines[0].reset()
    request = {"min": 0, "limit": 256 * MIB, "wait": DEADLINE_S}
    assert front.client.patch("/memory/org/m", json=request).status_code == 200
    return engines[0]


@pytest.fixture
def page(browser: Browser, front: Controller, engine: Engine) -> Iterator[Shown]:
    with browser.page(front.url) as page:
        page.wait_until(COUNT.format(2))
        yield page
        assert page.problems == []


# ---------------------------------------------------------------------------------- its files


def test_files_have_strict_security_policy_and_etags(front: Controller) -> None:
    index = front.get("/")
    assert index.status_code == 200
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    # No inline script, style or handler, and nothing from elsewhere.
    inline = r'<script(?! type="module" src="/dashboard/)|<style|style=| on\w+='
    assert re.findall(inline, index.text) == []
    found = {"/"} | set(re.findall(r'(?:src|href)="(/dashboard/[^"]+)"', index.text))
    assert len(found) == 4
    for path in list(found):
        found |= {
            f"/dashboard/{name}" for name in re.findall(r'from "\./([^"]+)"', front.get(path).text)
        }
    assert len(found) > 8
    for path in sorted(found):
        response = front.get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
        tag = response.headers["etag"]
        again = front.get(path, headers={"if-none-match": f'"other", W/{tag}'})
        assert (again.status_code, again.content) == (304, b"")
        assert "://" not in response.text.replace("http://www.w3.org/2000/svg", "")
        head = front.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert front.get("/dashboard/none.js").status_code == 404
    for path in ("/dashboard/../routes.py", "/dashboard/%2e%2e%2froutes.py", "/dashboard/"):
        assert front.get(path).status_code == 404


# ------------------------------------------------------------------------------------ the page


def test_rows_show_model_state(page: Shown, front: Controller) -> None:
    assert front.complete("org/m", max_tokens=60).status_code == 200
    row = page.row("org/m")
    expect(row.locator(".state")).to_have_text("awake")
    expect(row.get_by_text("also short")).to_be_visible()
    expect(row.locator(".figures")).to_contain_text("0.02requests/s")
    expect(row.locator(".figures")).to_contain_text("1tokens/s")
    expect(row.locator(".latency")).to_contain_text("ms")
    expect(page.page.locator("#totals")).to_contain_text("2 served, 2 awake, 0 asleep")


def test_hostile_name_is_shown_as_text(page: Shown) -> None:
    expect(page.row(HOSTILE).locator(".name")).to_have_text(HOSTILE)
    assert page.page.title() == "kvelastic"
    assert page.page.locator("#rows img, #rows b").count() == 0
    page.page.get_by_role("button", name=f"Logs of {HOSTILE}").click()
    expect(page.page.locator("#logs-title")).to_have_text(f"Logs of {HOSTILE}")
    expect(page.page.locator("#logs-lines")).to_contain_text("ready ")
    expect(page.row(HOSTILE).get_by_role("button", name="Sleep")).to_have_attribute(
        "title", "An engine of the kind openai cannot sleep."
    )


def test_sleep_and_wake(page: Shown, front: Controller, engine: Engine) -> None:
    row = page.row("org/m")
    sleep = row.get_by_role("button", name="Sleep org/m")
    wake = row.get_by_role("button", name="Wake org/m")
    expect(wake).to_have_attribute("aria-disabled", "true")
    engine.change(sleep_hold="sleep")
    sleep.click()
    answer = row.locator("td:last-child .answer")
    expect(answer).to_have_text("Falling asleep …")
    expect(row.locator(".state")).to_have_text("falling asleep")
    engine.release("sleep")
    expect(answer).to_have_text("The model is asleep.")
    expect(row.locator(".state")).to_have_text("asleep")
    expect(sleep).to_have_attribute("aria-disabled", "true")
    expect(row.locator(".held")).to_contain_text("Asleep: its limit counts when it wakes")
    # The slider has the limit that it wakes with, and takes another one.
    text = row.get_by_label("Limit of org/m, as text")
    expect(text).to_have_value("256 MiB")
    text.fill("96M")
    text.press("Enter")
    expect(row.locator(".memory .answer")).to_contain_text("The model sleeps")
    expect(text).to_have_value("96 MiB")
    wake.click()
    expect(answer).to_have_text("The model is awake.")
    expect(row.locator(".state")).to_have_text("awake")
    assert front.get("/memory/org/m").json()["memory"]["requested_limit_bytes"] == 96 * MIB
    assert [path for method, path in page.asked if method == "POST"] == [
        "/action/sleep/org%2Fm",
        "/action/wakeup/org%2Fm",
    ]


@contextmanager
def request_under_way(front: Controller, engine: Engine) -> Iterator[None]:
    """The engine holds back the answer of a request in the body."""
    body = {"model": "org/m", "prompt": "x", "fake": {"hold": "it"}}
    with httpx.Client(base_url=front.url, timeout=DEADLINE_S) as client:
        busy = threading.Thread(target=lambda: client.post("/v1/completions", json=body))
        busy.start()
        wait_until(lambda: "it" in engine.state()["held"])
        yield
        engine.release("it")
        busy.join()


def test_refused_sleep_shows_the_reason(page: Shown, front: Controller, engine: Engine) -> None:
    row = page.row("org/m")
    with request_under_way(front, engine):
        row.get_by_role("button", name="Sleep org/m").click()
        expect(row.locator("td:last-child .answer")).to_contain_text("Not done: ")
    engine.change(sleep_status=500)
    row.get_by_role("button", name="Sleep org/m").click()
    expect(row.locator("td:last-child .answer")).to_contain_text("could not be put to sleep")
    expect(row.locator(".problem")).to_contain_text("sleep: ")
    engine.reset()
    row.get_by_role("button", name="Sleep org/m").click()
    expect(row.locator(".state")).to_have_text("asleep")
    expect(row.locator(".problem")).to_be_empty()


def test_logs_button_only_for_launched_engines(page: Shown) -> None:
    expect(page.row(HOSTILE).get_by_role("button", name="Logs")).to_be_visible()
    expect(page.row("org/m").get_by_role("button", name="Sleep")).to_be_visible()
    assert page.row("org/m").get_by_role("button", name="Logs").count() == 0


def test_outdated_result_message_is_removed(page: Shown, front: Controller, engine: Engine) -> None:
    row = page.row("org/m")
    answer = row.locator("td:last-child .answer")
    row.get_by_role("button", name="Sleep org/m").click()
    expect(answer).to_have_text("The model is asleep.")
    assert front.complete("org/m").status_code == 200  # a request wakes it
    expect(row.locator(".state")).to_have_text("awake")
    expect(answer).to_be_empty()
    # A refusal goes with its reason.
    with request_under_way(front, engine):
        row.get_by_role("button", name="Sleep org/m").click()
        expect(answer).to_contain_text("Not done: ")
    expect(answer).to_be_empty()
    # What was applied is no longer in force when somebody else has requested another thing.
    text = row.get_by_label("Limit of org/m, as text")
    text.fill("128M")
    text.press("Enter")
    request = row.locator(".memory .answer")
    expect(request).to_have_text("Applied: limit 128M.")
    expect(row.locator(".held")).to_contain_text("of its limit of 128 MiB: ")
    front.client.patch("/memory/org/m", json={"limit": 256 * MIB, "wait": DEADLINE_S})
    expect(request).to_be_empty()
    expect(row.locator(".held")).to_contain_text("of 256 MiB: ")


def test_slider_sends_limit_and_shows_result(page: Shown, front: Controller) -> None:
    row = page.row("org/m")
    limit = row.get_by_role("slider", name="Limit of org/m")
    expect(limit).to_have_attribute("aria-valuetext", "256 MiB")
    box = limit.bounding_box()
    page.page.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=5)
    assert ("PATCH", "/memory/org%2Fm") not in page.asked  # not before it is let go
    page.page.mouse.up()
    answer = row.locator(".memory .answer")
    expect(answer).to_have_text("Applied: limit 128 MiB.")
    assert front.get("/memory/org/m").json()["memory"]["limit_bytes"] == 128 * MIB
    expect(limit).to_have_attribute("aria-valuetext", "128 MiB")
    # As text: what is not understood, what is refused, and what is rounded are said.
    text = row.get_by_label("Min of org/m, as text")
    text.fill("a lot")
    text.press("Enter")
    expect(answer).to_contain_text("Not done: size 'a lot' is not understood")
    expect(text).to_have_value("0 B")
    text.fill("1T")
    text.press("Enter")
    expect(answer).to_have_text(re.compile("^(Refused|Not done): ."))
    expect(text).to_have_value("0 B")


def test_slow_limit_request_shows_progress_then_applied(
    page: Shown, front: Controller, instance: Instance
) -> None:
    ids = instance.alloc(64)
    assert ids
    row = page.row("org/m")
    text = row.get_by_label("Limit of org/m, as text")
    text.fill("8M")
    text.press("Enter")
    answer = row.locator(".memory .answer")
    expect(answer).to_contain_text("still to be given back")
    expect(row.locator(".held")).to_contain_text("over its limit")
    instance.free(ids)
    expect(answer).to_have_text("In force now: limit 8M.")


def test_device_card_and_model_row_agree(page: Shown, instance: Instance) -> None:
    """The chart's samples are older than what a model's row says; the table below it is not."""
    stale: list[str] = []

    def first_answer(route: Route) -> None:
        if not stale:
            stale.append(route.fetch().text())
        route.fulfill(body=stale[0], content_type="application/json")

    with page.page.expect_response("**/devices/history*", timeout=1000 * DEADLINE_S):
        page.page.route("**/devices/history*", first_answer)
    ids = instance.alloc(33)
    assert ids
    instance.cache(ids[1::2])  # of no page all blocks: others could have none of it
    try:
        expect(page.row("org/m").locator(".held")).to_contain_text("8.5 MiB in use, 8 MiB cached")
        card = page.page.locator(".card").filter(has_text=f"group web-{os.getpid()}")
        expect(card.locator(".legend tbody tr").first).to_contain_text("org/m8.5 MiB8 MiB")
    finally:
        instance.free(ids)


def test_the_chart_shows_memory_over_time(page: Shown, instance: Instance) -> None:
    ids = instance.alloc(32)
    assert ids
    try:
        group = f"group web-{os.getpid()}"
        card = page.page.locator(".card").filter(has_text=group)
        in_use = 32 * PAGE_BYTES // 4 // MIB
        expect(card.locator(".legend tbody tr").first).to_contain_text(f"org/m{in_use} MiB")
        expect(card.locator("path.area")).to_have_count(4)
        expect(card.locator("path.capacity")).to_have_count(1)
        expect(card.locator(".capacity-label")).to_have_text("capacity 256 MiB")
        page.page.get_by_label("by model").check(force=True)
        expect(card.locator("path.area")).to_have_count(1)
        expect(card.locator("path.area.model-0")).to_have_count(1)
        # A moment of the past, by the keyboard.
        card.locator(".chart").focus()
        page.page.keyboard.press("Home")
        expect(card.locator(".legend thead th").first).to_have_text(
            re.compile(r"At \d\d:\d\d:\d\d")
        )
        page.page.keyboard.press("Escape")
        expect(card.locator(".legend thead th").first).to_have_text("Now")
        card.get_by_text("The last ten minutes as a table").click()
        expect(card.locator(".past thead th")).to_have_text(["Time", "org/m", "Free", "Capacity"])
        expect(card.locator(".past tbody tr").first).to_contain_text("256 MiB")
    finally:
        instance.free(ids)


def test_cluster_page_shows_the_nodes(page: Shown) -> None:
    """With the fields that the front of a cluster adds (docs/cluster.md)."""
    cell = page.row("org/m").locator("td").first
    expect(cell).to_be_hidden()

    def add(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        for row in body["models"].values() if route.request.url.endswith("/models") else ():
            row |= {"node": "10.0.0.1", "model": "chat"}
        for device in body.get("devices", []):
            device["node"] = "10.0.0.1"
        states = {"10.0.0.1": "ok", "10.0.0.2": "dead"}
        body["nodes"] = [{"node": node, "state": state} for node, state in states.items()]
        route.fulfill(response=answer, json={**body, "no_reply": ["r1"]})

    for path in ("models", "memory", "devices/history*"):
        page.page.route(f"**/{path}", add)
    expect(page.page.get_by_role("columnheader", name="Node", exact=True).first).to_be_visible()
    expect(cell).to_have_text("10.0.0.1")
    expect(page.row("org/m").get_by_text("chat · vllm")).to_be_visible()
    card = page.page.locator(".card").filter(has_text=f"group web-{os.getpid()}")
    expect(card.filter(has_text="Host memory of 10.0.0.1")).to_be_visible()
    banner = page.page.locator("#banner")
    expect(banner).to_have_text("No reply from machine 10.0.0.2, replica r1.")
    page.page.unroute_all()


def test_links_are_shown(page: Shown, front: Controller, tmp_path: Path) -> None:
    """Where processes of this machine have some; ids have 64 bits, and a number here 53."""
    one, two = (1 << 64) - 1, (1 << 63) + 1
    address = parse_address(f"unix://{tmp_path}/node")
    rows = "[...document.querySelectorAll('#link-rows > tr')].map((row) => row.innerText).join()"
    with Node(one, listen=[address], role=HOSTILE[:20]), Node(two) as reader:
        link = reader.link(address, timeout_s=DEADLINE_S)
        page.wait_until(f"{rows}.includes('{one} (') && {rows}.includes('{two} (')")
        page.wait_until(f"{rows}.includes('<img src=x')")
        assert page.page.locator("#links-section").is_visible()
        nodes = front.get("/links").json()["nodes"]
        (shown,) = [node for node in nodes if node["name"] == str(two)]
        assert [(each["peer_name"], each["way"]) for each in shown["links"]] == [
            (str(one), "memory")
        ]
        link.unlink(timeout_s=DEADLINE_S)
        page.wait_until(f"{rows}.includes('ended: unlinked')")
    page.wait_until("document.getElementById('links-section').hidden")


def test_dashboard_works_with_the_keyboard_alone(page: Shown, front: Controller) -> None:
    keyboard = page.page.keyboard
    seen: list[str] = []
    focused = "[document.activeElement].map((e) => e.ariaLabel || e.textContent)[0]"

    def tab_to(name: str) -> None:
        for _ in range(60):
            keyboard.press("Tab")
            seen.append(page.page.evaluate(focused))
            if seen[-1] == name:
                style = page.page.evaluate(
                    "[getComputedStyle(document.activeElement)]"
                    ".map((s) => [s.outlineStyle, parseFloat(s.outlineWidth)])[0]"
                )
                assert style[0] != "none"
                assert style[1] >= 1, f"no visible focus on {name}"
                return
        raise AssertionError(f"{name!r} was not reached: {seen}")

    tab_to("Skip to the models")
    keyboard.press("Enter")
    tab_to("Limit of org/m")
    keyboard.press("ArrowLeft")
    answer = page.row("org/m").locator(".memory .answer")
    expect(answer).to_have_text("Applied: limit 254 MiB.")
    keyboard.press("Home")
    expect(answer).to_contain_text("limit 0 B")
    keyboard.press("End")
    expect(answer).to_have_text("Applied: limit 256 MiB.")
    tab_to("Sleep org/m")
    keyboard.press("Enter")
    expect(page.row("org/m").locator(".state")).to_have_text("asleep")
    assert page.page.evaluate(focused) == "Sleep org/m"  # the focus is not lost
    tab_to("Wake org/m")
    keyboard.press("Space")
    expect(page.row("org/m").locator(".state")).to_have_text("awake")
    tab_to(f"Logs of {HOSTILE}")
    keyboard.press("Enter")
    expect(page.page.locator("#logs")).to_be_visible()
    keyboard.press("Escape")
    expect(page.page.locator("#logs")).to_be_hidden()
    assert page.page.evaluate(focused) == f"Logs of {HOSTILE}"


HIDE = """
let hidden = false;
Object.defineProperty(document, "hidden", {get: () => hidden});
window.hide = (value) => { hidden = value; document.dispatchEvent(new Event("visibilitychange")); };
"""


def test_hidden_page_stops_polling(browser: Browser, front: Controller, engine: Engine) -> None:
    with browser.page(front.url, before=HIDE) as page:
        page.wait_until(COUNT.format(2))
        # Timers of the page go on by this clock only, from here on.
        page.page.clock.install()
        with page.page.expect_response("**/devices/history*"):
            page.page.clock.run_for(5_000)
        page.page.evaluate("hide(true)")
        expect(page.page.locator("#link")).to_have_text("Paused")
        page.page.wait_for_load_state("networkidle")
        before = len(page.asked)
        page.page.clock.run_for(60_000)
        assert len(page.asked) == before
        page.page.evaluate("hide(false)")
        expect(page.page.locator("#link")).to_contain_text("Live")
        assert len(page.asked) > before


# --------------------------------------------------------------------------------------- looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 768, 360])
def test_layout_at_each_width_and_colour_scheme(
    browser: Browser, front: Controller, engine: Engine, tmp_path: Path, scheme: Scheme, width: int
) -> None:
    is_phone = width == 360
    with browser.page(front.url, width=width, height=800, is_phone=is_phone, scheme=scheme) as page:
        page.wait_until(COUNT.format(2))
        expect(page.page.locator("path.area").first).to_be_attached()
        page.picture(tmp_path / f"{scheme}-{width}.png")
        assert (tmp_path / f"{scheme}-{width}.png").stat().st_size > 10_000
        assert not page.has_overflow()
        widths = page.page.evaluate(  # in one call: the table is drawn anew all the time
            "() => [...document.querySelectorAll('.legend tbody th')]"
            ".map((one) => one.getBoundingClientRect().width)"
        )
        assert min(widths) > 60, "squeezed out"
        assert page.pale() == []
        assert page.unnamed() == []
        ground = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", ground)[0]) < 128) == (scheme == "dark")
        page.page.get_by_role("button", name=f"Logs of {HOSTILE}").click()
        expect(page.page.locator("#logs-lines")).to_contain_text("ready ")
        assert not page.has_overflow()
        assert page.pale() == []
        assert page.problems == []
