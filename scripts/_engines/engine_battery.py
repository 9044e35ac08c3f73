"""A short battery over one engine: stock's tokens cold, cached, under a limit, and after a sleep.

    python scripts/_engines/engine_battery.py transformers FOLDER [OVERLAY]

OVERLAY is a folder with another release of the engine (`overlay`), put first on PYTHONPATH. Prints
a line of JSON for each step that passed: {"passed": "tokens"}. Exits with an error at the first
step that fails. SIGTERM ends it with its engines. Logs are in FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from engine_server import EngineServer, Request
from sglang_server import PAGE_TOKENS, SglangServer
from transformers_process import TransformersEngine, make_prompts
from vllm_server import VllmServer, engine_environment
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import segment

Tokens = list[list[int]]
PROGRAMS = Path(__file__).parents[2] / "tests" / "programs"
NAME = f"battery_{os.getpid()}"
PROMPTS = make_prompts(16, seed=11, shortest=100, longest=200)
NEW_TOKENS = 24
FEW_PAGES = 2
Burst = tuple[Callable[[], Tokens], Tokens]
"""Sends the requests; stock's tokens."""
_INSTALLED = "5.19"
"""The series of transformers that is in the environment itself."""


def check_tokens(burst: Callable[[], Tokens], expected: Tokens) -> None:
    """Compare cold and cached answers."""
    for state in ("cold", "cached"):
        assert burst() == expected, f"the tokens differ from stock's, {state}"


def check_limit(burst: Callable[[], Tokens], expected: Tokens) -> None:
    """Lower the limit under load to a few pages, and lift it."""
    page_bytes = segment.inspect(NAME).usage["page_bytes"]
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(burst)
        wait_until(lambda: segment.inspect(NAME).usage["blocks_in_use"] > 0)
        segment.request(NAME, limit_bytes=FEW_PAGES * page_bytes, wait_s=DEADLINE_S)
        assert answers.result() == expected, "the tokens differ from stock's under a limit"
    mapped = segment.inspect(NAME).usage["mapped_bytes"]
    assert mapped <= FEW_PAGES * page_bytes, f"{mapped} bytes are mapped over the limit"
    segment.request(NAME, limit_bytes=1 << 40, wait_s=DEADLINE_S)


def check_sleep(burst: Callable[[], Tokens], expected: Tokens) -> None:
    """Sleep holds no memory; a wake brings the tokens back."""
    for asleep in (True, False):
        answer = segment.request(NAME, asleep=asleep, wait_s=DEADLINE_S)
        assert answer.state == "applied", f"asleep={asleep} was {answer.state}"
        if asleep:
            mapped = segment.inspect(NAME).usage["mapped_bytes"]
            assert mapped == 0, f"{mapped} bytes are mapped asleep"
    assert burst() == expected, "the tokens differ from stock's after a wake"


CHECKS = {"tokens": check_tokens, "limit": check_limit, "sleep": check_sleep}


@contextmanager
def _transformers(folder: Path, overlay: dict[str, str], on: dict[str, str]) -> Iterator[Burst]:
    arguments = ("--block-tokens", "64", "--num-blocks", "127")
    expected: Tokens = []
    for environment in ({}, on):
        log = folder / ("elastic.log" if environment else "stock.log")
        variables = {**overlay, **environment}
        with TransformersEngine(_INSTALLED, log, arguments, variables) as engine:
            engine.wait_until_ready()
            if environment:
                yield lambda: engine.burst(PROMPTS, NEW_TOKENS), expected
            else:
                expected = engine.burst(PROMPTS, NEW_TOKENS)
            engine.stop()


@contextmanager
def _server(
    kind: type[VllmServer] | type[SglangServer],
    folder: Path,
    overlay: dict[str, str],
    on: dict[str, str],
    shape: tuple[int, ...] = (),
    arguments: tuple[str, ...] = (),
) -> Iterator[Burst]:
    model = folder / "model"
    command = [sys.executable, str(PROGRAMS / "tiny_model.py"), str(model), *map(str, shape)]
    subprocess.run(command, env=engine_environment(), check=True)
    server: EngineServer
    with kind(model, folder / "stock.log", overlay, arguments) as server:
        server.wait_until_ready()
        with ThreadPoolExecutor(16) as threads:
            wanted = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS]
            requests = [each for each in threads.map(server.decided, wanted) if each.max_tokens]
        expected = server.complete_all(requests)
        server.stop()
    with kind(model, folder / "elastic.log", {**overlay, **on}, arguments) as server:
        server.wait_until_ready()
        yield lambda: server.complete_all(requests), expected
        server.stop()


def main() -> None:
    # An interrupt is ignored in what a shell starts in the background.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("interrupted"))
    engine, folder, *overlays = sys.argv[1:]
    overlay = {"PYTHONPATH": overlays[0]} if overlays else {}
    on = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": NAME,
        "KVELASTIC_SANITY_CHECK": "true",
        "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
    }
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    if engine == "transformers":
        running = _transformers(where, overlay, on)
    elif engine == "vllm":
        running = _server(VllmServer, where, overlay, on)
    else:
        pages = ("--page-size", str(PAGE_TOKENS))
        running = _server(SglangServer, where, overlay, on, (2, 2, 128), pages)
    with running as (burst, expected):
        for step, check in CHECKS.items():
            check(burst, expected)
            print(json.dumps({"passed": step}), flush=True)


if __name__ == "__main__":
    os.environ["KVELASTIC_LEDGER"] = NAME
    main()
