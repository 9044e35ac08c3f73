"""Draws the controller's dashboard in Chromium, with two engines under load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from browser import Browser, expect
from ledger_instance import Instance
from running import Controller, Engine

CLIENTS = 6
WIDTH, HEIGHT = 1280, 900


@contextmanager
def front(chat: Instance, code: Instance) -> Iterator[Controller]:
    """Yield a controller with two fake engines, whose memory is that of the two instances."""
    with Engine("vllm", "chat") as first, Engine("vllm", "code") as second:
        models = [
            {"name": engine.model, "engine": "vllm", "url": engine.url, "instance": instance.name}
            for engine, instance in ((first, chat), (second, code))
        ]
        with Controller({"models": models}) as controller:
            yield controller


@contextmanager
def requests(controller: Controller) -> Iterator[None]:
    """Run clients that alternate between the models and wait for the end of each response."""
    ended = threading.Event()

    def ask(number: int) -> None:
        pace = {"first_s": 0.05 + 0.03 * number, "token_s": 0.02}
        with httpx.Client(base_url=controller.url, timeout=60) as client:
            turn = number
            while not ended.is_set():
                body = {"model": ("chat", "code")[turn % 2], "prompt": "x", "stream": True}
                client.post("/v1/completions", json=body | {"max_tokens": 40, "fake": pace})
                turn += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def draw(path: Path, controller: Controller, seconds: float) -> None:
    """Show the dashboard for `seconds`, then write a picture of it to `path`."""
    with (
        Browser() as browser,
        browser.page(controller.url, width=WIDTH, height=HEIGHT) as shown,
    ):
        expect(shown.row("chat")).to_be_visible()
        shown.page.wait_for_timeout(1000 * seconds)
        shown.picture(path)
        if shown.problems:
            raise SystemExit("the dashboard complained: " + "; ".join(shown.problems))
