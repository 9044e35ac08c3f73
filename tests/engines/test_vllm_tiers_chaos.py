"""Chaos with tiers: what `test_vllm_chaos` does, over a disk that is too small, slow, and erased.

    CHAOS_SEED=7 CHAOS_SECONDS=600 pytest --soak tests/engines/test_vllm_tiers_chaos.py

Blocks leave and come back all the time. Every answer is stock vLLM's, however it was put together;
requests fail only with their server. In the soak a server that was killed is followed by one that
finds what it left.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_disk import ANSWER_S, BadDisk, OverBadDisk
from chaos import SEED, SOAK_S, Clients, check_that_nothing_is_left, live_and_die, report
from known_answers import know
from test_vllm_chaos import ENDS, ENVIRONMENT, GROUP, NAME, VllmOperator
from vllm_server import VllmServer, make_requests

from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(2400)

SHORT_S = 10.0


class TieredOperator(OverBadDisk, VllmOperator):
    """Also ends generations."""

    def things(self) -> dict[Callable[[], None], int]:
        return {**super().things(), self.reset: 1}

    def reset(self) -> None:
        """What the disk has is of no use from here on; requests that run begin again."""
        status, text = self.server.request(
            "/reset_prefix_cache?reset_running_requests=true", "POST", ANSWER_S
        )
        assert status == 200, text


class Disk(BadDisk):
    """And servers over it."""

    def serve(self, model: Path, log: Path) -> VllmServer:
        self.slow.delay(0)
        environment = {**ENVIRONMENT, **self.environment}
        return VllmServer(model, log, environment, under=self.slow.under)

    def operator(self, server: VllmServer, clients: Clients, pick: random.Random) -> TieredOperator:
        operator = TieredOperator(server, NAME, clients, pick)
        operator.disk = self
        return operator


def check_log(log: Path) -> None:
    text = log.read_text(errors="replace")
    for word in ("sanity check failed", "IntegrityError", "AssertionError"):
        assert word not in text, log


@pytest.mark.end_to_end
def test_random_requests_over_a_bad_disk(servers, tiny_model, log_folder, tmp_path, capsys) -> None:
    known = know(servers[0], make_requests(20, seed=33, longest=400))
    servers.end()  # three servers at once need too much memory
    disk, pick = Disk(tmp_path), random.Random(SEED)
    log = log_folder / "tiers_chaos.log"
    with disk.serve(tiny_model, log) as server, Clients(known) as clients:
        clients.server = server.wait_until_ready()
        operator = disk.operator(server, clients, pick)
        end_s = time.monotonic() + SHORT_S
        # A busy machine may load no block in that time, so go on until it has.
        while time.monotonic() < end_s or not clients.counts["blocks loaded"]:
            operator.do_something()
        clients.come_home()
        disk.slow.delay(0)
        assert server.stop() == 0
    clients.check()
    check_log(log)
    check_that_nothing_is_left(NAME, GROUP, clients.counts)
    report(capsys, SHORT_S, clients)


@pytest.mark.soak
def test_server_restarts_over_a_bad_disk(stock, tiny_model, log_folder, tmp_path, capsys) -> None:
    with capsys.disabled():
        print(f"\nchaos with tiers: CHAOS_SEED={SEED}, logs in {log_folder}")
    disk, pick = Disk(tmp_path), random.Random(SEED)
    end_s = time.monotonic() + SOAK_S
    ends: list[str] = []
    with (
        contextlib.ExitStack() as at_last,
        Clients(know(stock, make_requests(48, seed=34, longest=550))) as clients,
    ):
        at_last.callback(segment.reap)  # where the test has failed
        while time.monotonic() < end_s:
            log = log_folder / f"tiers_chaos_{clients.counts['starts']}.log"
            ends = ends or pick.sample(ENDS, len(ENDS))
            with disk.serve(tiny_model, log) as server:
                operator = disk.operator(server.wait_until_ready(), clients, pick)
                live_and_die(operator, ends, end_s)
            check_that_nothing_is_left(NAME, GROUP, clients.counts)
            check_log(log)
            assert not clients.broken, clients.broken
    clients.check()
    report(capsys, SOAK_S, clients)
