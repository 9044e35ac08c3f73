"""Everything at once, at random: load, limits, sleep, standing, trims; and, in the soak, killings.

One thread is the operator, a few are clients. A server that is killed, or whose worker is stopped
for too long, has to end by itself, and leaves nothing; the next one starts by the same name.

    CHAOS_SEED=7 CHAOS_SECONDS=120 pytest --soak tests/engines/test_vllm_chaos.py

What the operator does follows from the seed; when it meets what is going on does not.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from asking_threads import AskingThreads
from test_vllm_sleep_cycles import (
    SLEEP_DEADLINE_S,
    Known,
    Times,
    ask,
    call,
    fall_asleep,
    held_bytes,
    know,
    wake_up,
    workers_of,
)
from vllm_server import KV_BYTES, VllmServer, make_requests

from kvelastic import ledger, segment
from kvelastic.errors import SegmentError

pytestmark = pytest.mark.timeout(2400)

SEED = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
SOAK_S = float(os.environ.get("CHAOS_SECONDS") or 600)
SHORT_S = 25.0
KILL_EVERY_S = (20.0, 50.0)
"""Of a server that is up: starting one takes about as long again."""

NAME = f"kvelastic_chaos_{os.getpid()}"
GROUP = f"chaos-{os.getpid()}"
SHM = Path("/dev/shm")
CLIENTS = 6
IPC_TIMEOUT_S = 4
STEP_TIMEOUT_S = 20
"""vLLM's own patience with a worker."""
STOPPED_S = IPC_TIMEOUT_S + 3
ANSWER_DEADLINE_S = 150.0
"""For any answer, an error or a closed connection too."""
END_DEADLINE_S = 90.0
"""Until a server has ended by itself after its worker or engine core was killed or stopped."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_TIMEOUT_S),
    "ENABLE_KVELASTIC": "true",
    "KVELASTIC_IPC_NAME": NAME,
    "KVELASTIC_LEDGER": GROUP,
    "KVELASTIC_IPC_TIMEOUT": str(IPC_TIMEOUT_S),
    "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
    "KVELASTIC_SANITY_CHECK": "true",
}
LIMITS_PAGES = (0, 1, 2, 3, 4, 6, 8, 16, 32)
"""Every request fits into one page."""
ENDS = ("core", "worker", "stopped", "stopped for ever")
"""What is killed, and that a worker is stopped; each comes once before any comes twice."""
VLLM_WAYS = ("keep", "abort", "wait")


@dataclass
class Clients(AskingThreads):
    """Ask whatever server there is, all the time."""

    known: Sequence[Known]
    server: VllmServer | None = None
    counts: Counter[str] = field(default_factory=Counter)
    aborts: Times = field(default_factory=Times)
    """When the operator had requests aborted: only then may answers be cut short."""
    deaths: Times = field(default_factory=Times)
    """When a server was dying: only then may requests fail."""
    cut: list[tuple[float, float]] = field(default_factory=list)
    failed: list[tuple[float, float, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Rules that were broken."""
    longest_s: float = 0.0
    on_their_way: set[int] = field(default_factory=set)
    """Threads whose request has not been answered yet."""

    def seeds(self) -> range:
        return range(SEED, SEED + CLIENTS)

    def _send(self, pick: random.Random) -> None:
        while not self._done.is_set():
            server = self.server
            if server is None:
                self._done.wait(0.05)
                continue
            self.on_their_way.add(threading.get_ident())
            if self.server is server:
                self._ask(server, pick.choice(self.known))
            self.on_their_way.discard(threading.get_ident())
            if pick.random() < 0.1:
                self._done.wait(pick.random())

    def _ask(self, server: VllmServer, known: Known) -> None:
        sent_s = time.monotonic()
        try:
            answer = ask(server, known)
        except Exception as error:  # judged below
            ended_s = time.monotonic()
            self.failed.append((sent_s, ended_s, f"{type(error).__name__}: {error}"))
            self._done.wait(1)  # nobody may be there any more
        else:
            ended_s = answer.ended_s
            self.counts["full" if answer.is_full else "cut short"] += 1
            if not answer.is_full:
                self.cut.append((sent_s, ended_s))
            if not answer.is_right:
                self.broken.append(f"wrong tokens: {answer}")
        self.longest_s = max(self.longest_s, ended_s - sent_s)

    def come_home(self) -> None:
        """Ask nothing more; return when everything has been answered."""
        self.server = None
        end_s = time.monotonic() + ANSWER_DEADLINE_S
        while self.on_their_way:
            assert time.monotonic() < end_s, f"{len(self.on_their_way)} requests have no answer"
            time.sleep(0.05)

    def check(self) -> None:
        """Raise where a rule was broken. To be called when no request is on its way."""
        assert not self.broken, self.broken
        ends = Times([*self.aborts, *self.deaths])
        unexplained = [cut for cut in self.cut if not ends.overlap(*cut)]
        assert not unexplained, f"cut short, and nobody aborted it: {unexplained}"
        lost = [failed for failed in self.failed if not self.deaths.overlap(*failed[:2])]
        assert not lost, f"failed, although its server lived: {lost}"
        assert self.longest_s <= ANSWER_DEADLINE_S
        assert self.counts["full"] > 0


class Operator:
    """Requests this and that of one living server, and looks whether it holds."""

    def __init__(self, server: VllmServer, name: str, clients: Clients, pick: random.Random):
        self.server = server
        self.name = name
        self.clients = clients
        self.pick = pick
        self._workers = workers_of(server)
        self._page_bytes = segment.inspect(name).usage["page_bytes"]
        self._has_sleep_routes = call(server, "GET", "/is_sleeping")[0] == 200
        self._applied_bytes: int | None = None
        """The limit, if the last answer was that it holds."""
        self._samples = 0

    def things(self) -> dict[Callable[[], None], int]:
        """What it does, and how often."""
        return {self.limit: 4, self.stand: 1, self.trim: 1, self.sleep: 2, self.sleep_twice: 1}

    def do_something(self) -> None:
        things = self.things()
        (thing,) = self.pick.choices(list(things), list(things.values()))
        self.clients.counts[thing.__name__] += 1
        thing()
        self._look(self.pick.random(), self._applied_bytes)

    def limit(self) -> None:
        limit_bytes = self.pick.choice(LIMITS_PAGES) * self._page_bytes
        self._applied_bytes = None
        wait_s = self.pick.choice([None, 5.0])
        answer = segment.request(self.name, limit_bytes=limit_bytes, wait_s=wait_s)
        assert answer.state in {"applied", "shrinking"}, answer
        self.clients.counts[f"limit {answer.state}"] += 1
        if answer.state == "applied":
            assert answer.effective_limit_bytes == max(limit_bytes, self._page_bytes)
            self._applied_bytes = answer.effective_limit_bytes

    def stand(self) -> None:
        answer = segment.request(
            self.name,
            min_bytes=self.pick.randrange(3) * self._page_bytes,
            priority=self.pick.randrange(-5, 6),
            wait_s=5,
        )
        assert answer.state in {"applied", "shrinking"}, answer

    def trim(self) -> None:
        answer = segment.request(self.name, trim=True, wait_s=5)
        assert answer.state in {"applied", "shrinking"}, answer

    def sleep(self) -> None:
        way = self.pick.choice(["request", self._vllm_way()])
        with self._asleep(way):
            self._look(self.pick.uniform(0.1, 2.0), 0)

    def sleep_twice(self) -> None:
        """In both ways at once, and woken in any order."""
        ways = ["request", self._vllm_way()]
        self.pick.shuffle(ways)
        outer, inner = ways
        if self.pick.random() < 0.5:
            with self._asleep(outer), self._asleep(inner):
                self._look(self.pick.random(), 0)
            return
        with self._asleep(outer), self._asleep(inner):
            self._look(self.pick.random(), 0)
            wake_up(self.server, self.name, outer)

    def restore(self) -> None:
        """Without a limit, and with the standing that it began with."""
        segment.request(self.name, limit_bytes=KV_BYTES, min_bytes=0, priority=0, wait_s=5)

    @contextlib.contextmanager
    def _asleep(self, way: str) -> Iterator[None]:
        self.clients.counts[f"sleep by {way}"] += 1
        begin_s = time.monotonic()
        fall_asleep(self.server, self.name, way)
        self._wait_until_nothing_is_held()
        if way == "abort":
            self.clients.aborts.append((begin_s, time.monotonic() + 1))
        try:
            yield
        finally:
            wake_up(self.server, self.name, way)

    def _vllm_way(self) -> str:
        return self.pick.choice(VLLM_WAYS) if self._has_sleep_routes else "request"

    def _wait_until_nothing_is_held(self) -> None:
        deadline_s = time.monotonic() + SLEEP_DEADLINE_S
        while held_bytes(self._workers):
            assert time.monotonic() < deadline_s, segment.inspect(self.name)
            time.sleep(0.005)

    def _look(self, seconds: float, most_bytes: int | None) -> None:
        """Let time pass; what is held stays within what was answered."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if most_bytes is not None:
                held = held_bytes(self._workers)
                assert held <= most_bytes, f"{held} bytes held: {segment.inspect(self.name)}"
                self.clients.counts["samples"] += 1
            time.sleep(0.02)


# --- the end of a server ------------------------------------------------------------------------


def kill_or_stop(server: VllmServer, how: str, counts: Counter[str], pick: random.Random) -> None:
    """End a server by what happens to one of its processes. Returns when it has ended."""
    workers = workers_of(server)
    server.processes()  # who they are, and what memory they share
    counts[how] += 1
    if how.startswith("stopped") and not _stop(pick.choice(workers), resume=how == "stopped"):
        counts["stopped, and not missed"] += 1
        how = "core" if how == "stopped" else how
    if how == "core":
        server.processes()["core"].kill()
    elif how == "worker":
        pick.choice(workers).kill()
    begin_s = time.monotonic()
    try:
        server.process.wait(END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        what = f"{how}: the server lives on after {END_DEADLINE_S} s"
        raise AssertionError(f"{what}, see {server.log}: {server.tail()}") from None
    server.wait_until_gone()
    took_s = round(time.monotonic() - begin_s)
    counts["longest end, s"] = max(counts["longest end, s"], took_s)


def _stop(worker: psutil.Process, *, resume: bool) -> bool:
    """Stop a worker for longer than its scheduler waits for it; answers whether it was missed.

    It is missed where it has something to carry out for kvelastic: to give memory back, say. Where
    there is nothing of that kind, vLLM goes on as if nothing had been, once it is resumed.
    """
    with contextlib.suppress(SegmentError):
        segment.request(NAME, limit_bytes=KV_BYTES, wait_s=5)
    time.sleep(1)  # pages are mapped ahead of demand
    worker.suspend()
    end_s = time.monotonic() + STOPPED_S
    missed = False
    while time.monotonic() < end_s:
        try:
            segment.request(NAME, limit_bytes=0, trim=True)
            missed = missed or segment.inspect(NAME).answer["state"] == "failed"
        except SegmentError:  # it has ended
            missed = True
        time.sleep(0.2)
    if resume:
        with contextlib.suppress(psutil.Error):
            worker.resume()
    return missed


def check_that_nothing_is_left(counts: Counter[str]) -> None:
    if (SHM / NAME).exists():
        counts["segments left to the next who looks"] += 1
    segment.reap()  # as the next kvctl, or the next start, does it
    ledger.reap()
    left = [path.name for path in SHM.iterdir() if NAME in path.name or GROUP in path.name]
    assert not left, f"left in shared memory: {left}"
    assert not [info for info in ledger.list_ledgers() if info.group == GROUP]


# --- tests --------------------------------------------------------------------------------------


def test_random_requests_under_load(stock, elastic, instance_name, capsys) -> None:
    pick = random.Random(SEED)
    with Clients(know(stock, make_requests(32, seed=31, longest=500))) as clients:
        operator = Operator(elastic, instance_name, clients, pick)
        clients.server = elastic
        end_s = time.monotonic() + SHORT_S
        try:
            while time.monotonic() < end_s:
                operator.do_something()
        finally:
            operator.restore()
    clients.check()
    report(capsys, SHORT_S, clients)


@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 2], ids=["one_worker", "two_workers"])
def test_everything_at_random(tiny_model, log_folder, capsys, workers) -> None:
    with capsys.disabled():
        print(f"\nchaos, {workers} workers: CHAOS_SEED={SEED}, logs in {log_folder}")
    pick = random.Random(SEED)
    arguments = ["--tensor-parallel-size", str(workers)]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if workers == 2 else {}
    with VllmServer(tiny_model, log_folder / "chaos_stock.log", binding, arguments) as stock:
        known = know(stock.wait_until_ready(), make_requests(48, seed=32, longest=550))
        stock.stop()
    end_s = time.monotonic() + SOAK_S
    ends: list[str] = []
    with contextlib.ExitStack() as at_last, Clients(known) as clients:
        at_last.callback(segment.reap)  # where the test has failed
        while time.monotonic() < end_s:
            log = log_folder / f"chaos_{workers}_{clients.counts['starts']}.log"
            ends = ends or pick.sample(ENDS, len(ENDS))
            with VllmServer(tiny_model, log, ENVIRONMENT | binding, arguments) as server:
                operator = Operator(server.wait_until_ready(), NAME, clients, pick)
                live_and_die(operator, clients, ends, end_s)
            check_that_nothing_is_left(clients.counts)
            text = log.read_text(errors="replace")
            assert "sanity check failed" not in text, log
            assert "IntegrityError" not in text, log
            assert not clients.broken, clients.broken
    clients.check()
    report(capsys, SOAK_S, clients)


def live_and_die(operator: Operator, clients: Clients, ends: list[str], end_s: float) -> None:
    """One server's life, to its end: the last of `ends`, or the ordinary one when time is over."""
    clients.counts["starts"] += 1
    server, pick = operator.server, operator.pick
    clients.server = server
    dies_s = time.monotonic() + pick.uniform(*KILL_EVERY_S)
    while time.monotonic() < min(dies_s, end_s):
        operator.do_something()
    begin_s = time.monotonic()
    if begin_s >= end_s:
        clients.counts["ended in the ordinary way"] += 1
        # Stock vLLM waits for ever where requests are on their way when it is told to end.
        clients.come_home()
        assert server.stop() == 0
    else:
        kill_or_stop(server, ends.pop(), clients.counts, pick)
        clients.server = None
    # A client that has seen no end yet asks once more, of a port where nobody listens.
    clients.deaths.append((begin_s, time.monotonic() + 2))


def report(capsys, seconds: float, clients: Clients) -> None:
    counts = ", ".join(f"{name} {count}" for name, count in sorted(clients.counts.items()))
    with capsys.disabled():
        print(
            f"\nchaos, CHAOS_SEED={SEED}: {seconds:.0f} s; {counts}; {len(clients.failed)} "
            f"requests failed with their server; the longest wait was {clients.longest_s:.0f} s"
        )
