"""SGLang, everything at once, at random: what `test_vllm_chaos` does, and SGLang's own calls.

    CHAOS_SEED=7 CHAOS_SECONDS=120 pytest --soak tests/engines/test_sglang_chaos.py

SGLang looks for leaks after every step (`SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY`), and ends
where it finds one. The soak has a disk tier under all of it, which is too small, slow, and erased
(`test_sglang_tiers` has a short form of that): a server that was killed is followed by one that
finds what it left.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Callable

import needs
import psutil
import pytest
from bad_disk import BadDisk, OverBadDisk
from chaos import (
    SEED,
    SOAK_S,
    Clients,
    Operator,
    check_that_nothing_is_left,
    disturb_for,
    live_and_die,
    report,
)
from engine_server import Request
from known_answers import Known, know
from open_memfds import held_bytes
from sglang_pair import (
    BLOCK_BYTES,
    NEW_TOKENS,
    PAGE_BYTES,
    PROMPTS,
    SLEEPS_ON_IDLE,
    Pair,
    check_log,
)
from sglang_server import IN_CHUNKS, MAX_TOTAL_TOKENS, PAGE_TOKENS, SglangServer
from vllm_server import make_requests

from kvelastic.shared import segment

pytestmark = [needs.sglang, pytest.mark.timeout(2400)]

SHORT_S = 9.0
"""In each layout."""
NAME = f"kvelastic_sglang_chaos_{os.getpid()}"
GROUP = f"sglang-chaos-{os.getpid()}"
ENVIRONMENT = {
    "ENABLE_KVELASTIC": "true",
    "KVELASTIC_IPC_NAME": NAME,
    "KVELASTIC_LEDGER": GROUP,
    "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
    "KVELASTIC_SANITY_CHECK": "true",
}
ENDS = ("sglang::scheduler", "sglang::detokenizer", "server")
"""Which process is killed; each once before any twice."""
WAYS = ("retract", "abort")
"""What SGLang does with requests that run (`/pause_generation`) before its memory is released."""
END_DEADLINE_S = 90.0


class SglangOperator(Operator):
    """Also by SGLang's own calls, and by signals."""

    KV_BYTES = MAX_TOTAL_TOKENS // PAGE_TOKENS * BLOCK_BYTES
    server: SglangServer

    def __init__(
        self, server: SglangServer, name: str, clients: Clients, pick: random.Random
    ) -> None:
        super().__init__(server, name, clients, pick)
        self._scheduler = server.scheduler()

    def held_bytes(self) -> int:
        return held_bytes(self._scheduler.pid)

    def own_way(self) -> str:
        return self.pick.choice(WAYS)

    def fall_asleep(self, way: str) -> None:
        if way == "request":
            self.request_sleep()
            return
        self.server.post("/pause_generation", mode=way)
        self.server.post("/release_memory_occupation")
        assert segment.inspect(self.name).engine_asleep is True

    def wake_up(self, way: str) -> None:
        if way == "request":
            self.request_wake()
            return
        self.server.post("/resume_memory_occupation")
        self.server.post("/continue_generation")
        assert segment.inspect(self.name).engine_asleep is False

    def things(self) -> dict[Callable[[], None], int]:
        more = {self.abort: 1, self.flush: 1, self.pause: 1, self.stop: 1}
        return {**super().things(), self.limit: 5, self.sleep: 3, **more}

    def abort(self) -> None:
        begin_s = time.monotonic()
        self.server.post("/abort_request", abort_all=True)
        self.clients.aborts.append((begin_s, time.monotonic() + 1))

    def flush(self) -> None:
        """Refused while requests run: then it changes nothing."""
        status, _ = self.server.request("/flush_cache", "POST", 60)
        self.clients.counts[f"flush {status}"] += 1
        assert status in (200, 400)

    def pause(self) -> None:
        """Requests keep what they have, and go on."""
        self.server.post("/pause_generation", mode="in_place")
        self._look(self.pick.random(), self._applied_bytes)
        self.server.post("/continue_generation")

    def stop(self) -> None:
        """The scheduler stands still; what is asked for meanwhile is answered later."""
        self._scheduler.suspend()
        try:
            if self.pick.random() < 0.5:
                segment.request(self.name, limit_bytes=4 * self._page_bytes)
                self._applied_bytes = None
            time.sleep(self.pick.uniform(0.05, 1.0))
        finally:
            self._scheduler.resume()

    def kill(self, how: str) -> None:
        """SGLang ends all its processes where one of them has."""
        self.server.scheduler()  # who they are, and what memory they share
        self.clients.counts[f"{how} killed"] += 1
        process = psutil.Process(self.server.process.pid)
        if how != "server":
            (process,) = [
                child
                for child in process.children(recursive=True)
                if how in " ".join(child.cmdline())
            ]
        process.kill()
        try:
            self.server.process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            what = f"{how}: the server lives on after {END_DEADLINE_S} s"
            raise AssertionError(f"{what}, see {self.server.log}: {self.server.tail()}") from None
        self.server.wait_until_gone()


class TieredOperator(OverBadDisk, SglangOperator):
    """With a disk tier that is too small, slow, and erased."""


@pytest.mark.end_to_end
def test_random_requests_under_load(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    known = [
        Known(Request(prompt, NEW_TOKENS), tokens)
        for prompt, tokens in zip(PROMPTS, pair.expected, strict=True)
    ]
    pair.server.post("/flush_cache")
    with Clients(known) as clients:
        operator = SglangOperator(pair.server, pair.name, clients, random.Random(SEED))
        disturb_for(operator, SHORT_S)
    clients.check()
    report(capsys, SHORT_S, clients)
    assert pair.server.process.poll() is None, pair.server.tail()
    assert pair.burst() == pair.expected
    pair.server.post("/flush_cache")
    assert pair.usage()["blocks_in_use"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("contiguous", PAGE_BYTES, ids=["paged", "per buffer"])
def test_random_operations_crashes_and_load(sglang_model, tmp_path, capsys, contiguous) -> None:
    with capsys.disabled():
        print(f"\nchaos of SGLang: CHAOS_SEED={SEED}, logs in {tmp_path}")
    pick = random.Random(SEED)
    page_size = ("--page-size", str(PAGE_TOKENS))
    with SglangServer(sglang_model, tmp_path / "stock.log", {}, page_size) as stock:
        known = know(stock.wait_until_ready(), make_requests(48, seed=35, longest=280))
        stock.stop()
    disk = BadDisk(tmp_path)
    environment = {**ENVIRONMENT, **disk.environment, "KVELASTIC_CONTIGUOUS_LAYOUT": contiguous}
    arguments = ["--sleep-on-idle"] if contiguous == SLEEPS_ON_IDLE else IN_CHUNKS
    end_s = time.monotonic() + SOAK_S / len(PAGE_BYTES)
    ends: list[str] = []
    with contextlib.ExitStack() as at_last, Clients(known) as clients:
        at_last.callback(segment.reap)  # where the test has failed
        while time.monotonic() < end_s:
            log = tmp_path / f"chaos_{clients.counts['starts']}.log"
            ends = ends or pick.sample(ENDS, len(ENDS))
            disk.slow.delay(0)
            with SglangServer(sglang_model, log, environment, arguments, disk.slow.under) as server:
                operator = TieredOperator(server.wait_until_ready(), NAME, clients, pick)
                operator.disk = disk
                live_and_die(operator, ends, end_s)
                killed = server.process.returncode != 0
            check_that_nothing_is_left(NAME, GROUP, clients.counts)
            check_log(server, was_killed=killed)
            assert not clients.broken, clients.broken
    clients.check()
    assert clients.counts["blocks loaded"] > 0
    report(capsys, SOAK_S / len(PAGE_BYTES), clients)
