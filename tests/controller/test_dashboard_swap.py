"""The dashboard says who waits for whose memory, and why."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from browser import Browser, expect
from running import Controller, Engine, config_for
from waiting import wait_until

pytestmark = pytest.mark.slow


def test_rows_show_waiting_and_yielding_models(browser: Browser) -> None:
    """Of two models one is awake at once: the first streams while the second is asked for."""
    with Engine("vllm", "a") as one, Engine("vllm", "b") as two, ThreadPoolExecutor(1) as threads:
        config = config_for(
            one,
            two,
            groups=[{"name": "g", "models": ["a", "b"], "at_once": 1}],
            swap={"min_awake": 0},
        )
        with Controller(config) as front:
            assert front.post("/action/sleep/b").json()["success"]
            held = {"model": "a", "stream": True, "fake": {"hold": "h"}}
            with (
                browser.page(front.url) as page,
                front.client.stream("POST", "/v1/completions", json=held) as stream,
            ):
                turns = {name: page.row(name).locator(".turn") for name in "ab"}
                for turn in turns.values():
                    expect(turn).to_be_hidden()
                next(pieces := stream.iter_raw())
                asked = threads.submit(front.complete, "b")
                wait_until(lambda: front.get("/models").json()["models"]["b"]["waits"])
                expect(turns["b"]).to_have_text(
                    "Waits for its turn: a ends its requests first. To make room: a."
                )
                expect(turns["a"]).to_have_text("Makes room for b.")
                expect(page.row("b").locator(".state")).to_have_text("waking")
                assert page.pale() == []
                one.release("h")
                b"".join(pieces)
                assert asked.result().status_code == 200
                for turn in turns.values():
                    expect(turn).to_be_hidden()
                assert page.problems == []
