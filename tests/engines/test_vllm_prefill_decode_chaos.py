"""Chaos with two vLLM, one that computes prompts and one that decodes them, behind a proxy.

    CHAOS_SEED=7 CHAOS_SECONDS=600 pytest --soak tests/engines/test_vllm_prefill_decode_chaos.py

Both are limited, trimmed, put to sleep and woken meanwhile, and, in the soak, killed. Every answer
is stock vLLM's. A request fails only with the decode engine.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from chaos import (
    CLIENTS,
    KILL_EVERY_S,
    SEED,
    SOAK_S,
    Clients,
    check_that_nothing_is_left,
    report,
)
from known_answers import Known, know
from prefill_decode_servers import DECODE, PREFILL, Proxy, RoleServer
from test_vllm_chaos import ENDS, ENVIRONMENT, GROUP, VllmOperator
from tiny_architectures import ARCHITECTURES
from vllm_server import VllmServer, make_requests

from kvelastic.shared import segment

pytestmark = [pytest.mark.timeout(2400), pytest.mark.matrix]

PROMPTS = 200
SHAPES = ("gqa", "full_and_sliding", "head_sizes_in_one_group")
"""One group, two groups of which one has a window, and one group of several head sizes."""
PROGRAM = Path(__file__).parents[1] / "programs" / "tiny_architectures.py"


@dataclass
class EachOnce(Clients):
    """Clients that send each request once, and then end."""

    def __post_init__(self) -> None:
        self._left = list(self.known)
        self._lock = threading.Lock()
        self._at_work = CLIENTS

    def _send(self, pick: random.Random) -> None:
        while True:
            with self._lock:
                if not self._left or self._done.is_set():
                    self._at_work -= 1
                    return
                known = self._left.pop()
            assert self.server is not None
            self._ask(self.server, known)

    @property
    def are_done(self) -> bool:
        with self._lock:
            return not self._at_work


@dataclass
class Shape:
    """A model whose cache has this shape, and how vLLM serves it."""

    model: Path
    arguments: list[str]

    @classmethod
    def write(cls, name: str, folder: Path) -> Shape:
        subprocess.run([sys.executable, PROGRAM, name, folder], check=True)
        arguments = []
        for key, value in ARCHITECTURES[name].engine_args(str(folder)).items():
            option = f"--{key.replace('_', '-')}"
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [option] if value is True else [option, text]
        return cls(folder, arguments)

    def know(self, seed: int, logs: Path) -> list[Known]:
        with VllmServer(self.model, logs / "stock.log", arguments=self.arguments) as stock:
            known = know(stock.wait_until_ready(), make_requests(PROMPTS, seed))
            assert stock.stop() == 0
        return known

    def serve(self, role: str, log: Path) -> RoleServer:
        environment = {k: v for k, v in ENVIRONMENT.items() if k != "KVELASTIC_IPC_NAME"}
        return RoleServer(role, self.model, log, self.arguments, **environment)


@contextlib.contextmanager
def running(shape: Shape, logs: Path, number: int = 0) -> Iterator[Proxy]:
    with (
        shape.serve("prefill", logs / f"prefill{number}.log") as prefill,
        shape.serve("decode", logs / f"decode{number}.log") as decode,
    ):
        yield Proxy(prefill.wait_until_ready(), decode.wait_until_ready())
    for server in (prefill, decode):
        text = server.text()
        for word in ("sanity check failed", "IntegrityError", "AssertionError"):
            assert word not in text, server.log


def operators_of(proxy: Proxy, clients: Clients, pick: random.Random) -> list[VllmOperator]:
    servers = (proxy.prefill, proxy.decode)
    return [VllmOperator(server, server.name, clients, pick) for server in servers]


@pytest.mark.parametrize("name", SHAPES)
def test_random_operations_on_both_keep_tokens(name: str, tmp_path: Path, capsys) -> None:
    shape = Shape.write(name, tmp_path / "model")
    known, pick = shape.know(46, tmp_path), random.Random(SEED)
    began_s = time.monotonic()
    with running(shape, tmp_path) as proxy:
        clients = EachOnce(known, proxy)
        operators = operators_of(proxy, clients, pick)
        with clients:
            while not clients.are_done:
                pick.choice(operators).do_something()
        for operator in operators:
            operator.restore()
        assert not proxy.failed
        assert proxy.decode.pulled() > 0
        for server in (proxy.decode, proxy.prefill):
            assert server.stop() == 0
    clients.check()
    assert clients.counts["full"] + clients.counts["cut short"] == len(known)
    for instance in (PREFILL, DECODE):
        check_that_nothing_is_left(instance, GROUP, clients.counts)
    report(capsys, time.monotonic() - began_s, clients)


@pytest.mark.soak
@pytest.mark.parametrize("name", SHAPES)
def test_kills_of_either_keep_tokens(name: str, tmp_path: Path, capsys) -> None:
    with capsys.disabled():
        print(f"\nchaos with a pair: CHAOS_SEED={SEED}, logs in {tmp_path}")
    shape = Shape.write(name, tmp_path / "model")
    pick, end_s = random.Random(SEED), time.monotonic() + SOAK_S
    with contextlib.ExitStack() as at_last, Clients(shape.know(47, tmp_path)) as clients:
        at_last.callback(segment.reap)  # where the test has failed
        while time.monotonic() < end_s:
            with running(shape, tmp_path, clients.counts["starts"]) as proxy:
                _live_and_die(proxy, clients, pick, end_s)
            for instance in (PREFILL, DECODE):
                check_that_nothing_is_left(instance, GROUP, clients.counts)
            assert not clients.broken, clients.broken
    clients.check()
    report(capsys, SOAK_S, clients)


def _live_and_die(proxy: Proxy, clients: Clients, pick: random.Random, end_s: float) -> None:
    """A pair's life, until one of the two dies. The other one goes on if it can decode."""
    clients.counts["starts"] += 1
    clients.server = proxy
    operators = operators_of(proxy, clients, pick)
    _operate(operators, pick, end_s)
    victim, survivor = pick.sample(operators, 2)
    begin_s = time.monotonic()
    victim.kill(pick.choice(ENDS))
    clients.counts[f"{victim.name.split('_')[1]} killed"] += 1
    if victim.server is proxy.decode:
        clients.server = None
        clients.deaths.append((begin_s, time.monotonic() + 2))
    else:
        _operate([survivor], pick, end_s)
    lost = [failed for failed in proxy.failed if failed[1] < begin_s]
    assert not lost, f"failed, although both engines lived: {lost}"
    survivor.restore()
    clients.come_home()
    assert survivor.server.stop() == 0


def _operate(operators: Sequence[VllmOperator], pick: random.Random, end_s: float) -> None:
    dies_s = time.monotonic() + pick.uniform(*KILL_EVERY_S)
    while time.monotonic() < min(dies_s, end_s):
        pick.choice(operators).do_something()
