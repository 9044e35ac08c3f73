"""The dashboard in a browser: its key, engines' logs, a controller that goes and comes back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, expect
from ports import free_port
from running import Controller, Engine, config_for

pytestmark = pytest.mark.slow


API, ADMIN = "api-key-1", "admin-key-1"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("vllm", "org/m") as engine:
        yield engine


def test_logs_of_a_launched_engine(browser: Browser, tmp_path: Path) -> None:
    fake = Path(__file__).parent.parent / "fakes" / "engine.py"
    command = [sys.executable, str(fake), "--port={port}", "--model=m"]
    launch = {"command": command, "port": free_port(), "log_file": str(tmp_path / "log")}
    (tmp_path / "log").write_text("<script>document.title = 'owned'</script>\n")
    models = [{"name": "m", "engine": "vllm", "launch": launch}]
    with Controller({"models": models}) as front, browser.page(front.url) as page:
        expect(page.row("m").locator(".state")).to_have_text("awake")
        page.page.get_by_role("button", name="Logs of m").click()
        lines = page.page.locator("#logs-lines")
        expect(lines).to_contain_text("<script>document.title")
        expect(lines).to_contain_text("ready ")
        expect(page.page.locator("#logs-facts")).to_contain_text("awake · process ")
        with (tmp_path / "log").open("a") as file:
            file.write("one more line\n")
        expect(lines).to_contain_text("one more line")
        expect(page.row("m").locator(".memory")).to_contain_text("No instance is configured.")
        assert page.problems == []
        assert page.page.title() == "kvelastic"


def test_page_prompts_for_key_and_can_forget_it(browser: Browser, engine: Engine) -> None:
    auth = {"api_keys": [API], "admin_keys": [ADMIN]}
    with Controller(config_for(engine, auth=auth)) as front, browser.page(front.url) as page:
        dialog, field = page.page.locator("#key"), page.page.get_by_label("Key of this controller")
        expect(dialog).to_contain_text("This controller asks for a key.")
        asked = len(page.asked)
        field.fill("wrong")
        field.press("Enter")
        expect(dialog).to_contain_text("not accepted")
        assert len(page.asked) > asked
        field.fill(API)
        field.press("Enter")
        expect(page.row("org/m").locator(".state")).to_have_text("awake")
        expect(dialog).to_be_hidden()
        expect(page.page.locator("#banner")).to_be_hidden()
        # That key reads; the refusal stands where the button was pressed, and a key is asked for.
        page.page.get_by_role("button", name="Sleep org/m").click()
        expect(page.row("org/m").locator("td:last-child .answer")).to_contain_text(
            "Not done: This key is for models"
        )
        expect(dialog).to_contain_text("this needs an admin key")
        field.fill(ADMIN)
        field.press("Enter")
        page.page.get_by_role("button", name="Sleep org/m").click()
        expect(page.row("org/m").locator(".state")).to_have_text("asleep")
        page.page.get_by_role("button", name="Wake org/m").click()
        expect(page.row("org/m").locator(".state")).to_have_text("awake")
        stored = "[JSON.stringify(localStorage), document.cookie, location.href]"
        assert ADMIN not in str(page.page.evaluate(stored))
        page.page.reload()
        expect(page.row("org/m").locator(".state")).to_have_text("awake")
        page.page.get_by_role("button", name="Key").click()
        page.page.get_by_role("button", name="Forget it").click()
        expect(dialog).to_contain_text("This controller asks for a key.")
        page.page.keyboard.press("Escape")
        expect(page.page.locator("#banner")).to_contain_text("A key is needed")
        assert page.problems == []


def test_page_reconnects_after_controller_restart(browser: Browser, engine: Engine) -> None:
    config = config_for(engine)
    with Controller(config) as front:
        port, url = front.port, front.url
        page_of = browser.page(url)
        page = page_of.__enter__()
        try:
            page.wait_until("document.querySelectorAll('#rows > tr').length == 1")
            front.end()
            banner = page.page.locator("#banner")
            expect(banner).to_contain_text("The controller cannot be reached.")
            expect(page.page.locator("#link")).to_have_text("Not live")
            with Controller({**config, "server": {"port": port}}):
                expect(banner).to_be_hidden()
                expect(page.page.locator("#link")).to_contain_text("Live")
                expect(page.row("org/m").locator(".state")).to_have_text("awake")
        finally:
            page_of.__exit__(None, None, None)
