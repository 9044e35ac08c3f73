"""Everything at once, at random: what the chaos of all engines has in common.

A few threads are the clients (`Clients`): whatever is done to the server, each answer is stock's,
as far as it goes. One thread is the operator (`Operator`): it limits, trims, puts to sleep and
wakes, and looks whether what was answered holds. What it does follows from the seed; when it meets
what is going on does not.

    with Clients(known) as clients:
        clients.server = server
        operator.do_something()
    clients.check()
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asking_threads import AskingThreads
from engine_server import EngineServer
from known_answers import Answers, Known, Times, ask
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import InvalidArgumentError
from kvelastic.shared import ledger, segment

SEED = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
SOAK_S = float(os.environ.get("CHAOS_SECONDS") or 600)
SHM = Path("/dev/shm")
CLIENTS = 6
KILL_EVERY_S = (20.0, 50.0)
"""Of a server that is up: starting one takes about as long again."""
ANSWER_DEADLINE_S = DEADLINE_S
"""For any answer, an error or a closed connection too."""
SLEEP_DEADLINE_S = DEADLINE_S
LIMITS_PAGES = (0, 1, 2, 3, 4, 6, 8, 16, 32)
"""Every request fits into one page."""


@dataclass
class Clients(AskingThreads):
    """Ask whatever server there is, all the time."""

    known: Sequence[Known]
    server: Answers | None = None
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

    def _ask(self, server: Answers, known: Known) -> None:
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


class Operator(ABC):
    """Requests this and that of one living server, and looks whether it holds."""

    KV_BYTES: int
    """What the cache may hold without a limit."""

    def __init__(
        self, server: EngineServer, name: str, clients: Clients, pick: random.Random
    ) -> None:
        self.server = server
        self.name = name
        self.clients = clients
        self.pick = pick
        self._page_bytes = segment.inspect(name).usage["page_bytes"]
        self._applied_bytes: int | None = None
        """The limit, if the last answer was that it holds."""

    # --- what is an engine's own --------------------------------------------------------------

    @abstractmethod
    def held_bytes(self) -> int:
        """What the operating system holds for the KV cache."""

    @abstractmethod
    def own_way(self) -> str:
        """A way to sleep that is the engine's own, at random; `request`: it has none."""

    @abstractmethod
    def fall_asleep(self, way: str) -> None:
        """Returns once that was answered."""

    @abstractmethod
    def wake_up(self, way: str) -> None:
        """Likewise."""

    @abstractmethod
    def kill(self, how: str) -> None:
        """End the server by what happens to one of its processes; returns when it has ended."""

    # --- what it does -------------------------------------------------------------------------

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
        wait_s = self.pick.choice([0.0, 5.0])
        answer = self._request(wait_s, limit_bytes=limit_bytes)
        assert answer.state in {"applied", "shrinking"}, answer
        self.clients.counts[f"limit {answer.state}"] += 1
        if answer.state == "applied":
            effective_bytes = answer.effective_limit_bytes
            if limit_bytes <= self.KV_BYTES:
                assert effective_bytes == max(limit_bytes, self._page_bytes), answer
            else:
                assert self.KV_BYTES <= effective_bytes <= limit_bytes, answer
            self._applied_bytes = answer.effective_limit_bytes

    def stand(self) -> None:
        min_bytes = self.pick.randrange(3) * self._page_bytes
        try:
            answer = self._request(5, min_bytes=min_bytes, priority=self.pick.randrange(-5, 6))
        except InvalidArgumentError:
            assert min_bytes > 0  # above the limit in force
            return
        assert answer.state in {"applied", "shrinking"}, answer

    def trim(self) -> None:
        answer = self._request(5, trim=True)
        assert answer.state in {"applied", "shrinking"}, answer

    def sleep(self) -> None:
        way = self.pick.choice(["request", self.own_way()])
        with self._asleep(way):
            self._look(self.pick.uniform(0.1, 2.0), 0)

    def sleep_twice(self) -> None:
        """In both ways at once, and woken in any order."""
        ways = ["request", self.own_way()]
        self.pick.shuffle(ways)
        outer, inner = ways
        if self.pick.random() < 0.5:
            with self._asleep(outer), self._asleep(inner):
                self._look(self.pick.random(), 0)
            return
        with self._asleep(outer), self._asleep(inner):
            self._look(self.pick.random(), 0)
            self.wake_up(outer)

    def restore(self) -> None:
        """Without a limit, and with the standing that it began with."""
        segment.request(self.name, limit_bytes=self.KV_BYTES, min_bytes=0, priority=0, wait_s=5)

    def _request(self, wait_s: float, **changes: Any) -> segment.Ack:
        """The instance's answer, which may come later than `wait_s` where the machine is busy."""
        with segment.post(self.name, segment.Request(**changes)) as requested:
            requested.settled(wait_s)
            wait_until(lambda: requested.now().state != "none", "no answer to a request")
            return requested.now()

    @contextlib.contextmanager
    def _asleep(self, way: str) -> Iterator[None]:
        self.clients.counts[f"sleep by {way}"] += 1
        begin_s = time.monotonic()
        self.fall_asleep(way)
        self._wait_until_nothing_is_held()
        if way == "abort":
            self.clients.aborts.append((begin_s, time.monotonic() + 1))
        try:
            yield
        finally:
            self.wake_up(way)

    def request_sleep(self) -> None:
        """As `kvctl sleep` does it."""
        answer = segment.request(self.name, asleep=True, wait_s=SLEEP_DEADLINE_S)
        assert (answer.state, answer.asleep) == ("applied", True), answer

    def request_wake(self) -> None:
        """As `kvctl wake` does it."""
        answer = segment.request(self.name, asleep=False, wait_s=SLEEP_DEADLINE_S)
        assert (answer.state, answer.asleep) == ("applied", False), answer

    def _wait_until_nothing_is_held(self) -> None:
        wait_until(lambda: not self.held_bytes(), "a sleeping model holds memory")

    def _look(self, seconds: float, most_bytes: int | None) -> None:
        """Let time pass; what is held stays within what was answered."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if most_bytes is not None:
                held = self.held_bytes()
                assert held <= most_bytes, f"{held} bytes held: {segment.inspect(self.name)}"
                self.clients.counts["samples"] += 1
            time.sleep(0.02)


def disturb_for(operator: Operator, seconds: float) -> None:
    """The short form: one server that lives, restored at the end."""
    operator.clients.server = operator.server
    end_s = time.monotonic() + seconds
    try:
        while time.monotonic() < end_s:
            operator.do_something()
    finally:
        operator.restore()


def live_and_die(operator: Operator, ends: list[str], end_s: float) -> None:
    """One server's life, to its end: the last of `ends`, or the ordinary one when time is over."""
    server, clients = operator.server, operator.clients
    clients.counts["starts"] += 1
    clients.server = server
    dies_s = time.monotonic() + operator.pick.uniform(*KILL_EVERY_S)
    while time.monotonic() < min(dies_s, end_s):
        operator.do_something()
    begin_s = time.monotonic()
    if begin_s >= end_s:
        clients.counts["ended in the ordinary way"] += 1
        # Stock vLLM waits for ever where requests are on their way when it is told to end.
        clients.come_home()
        assert server.stop() == 0
    else:
        operator.kill(ends.pop())
        clients.server = None
    # A client that has seen no end yet asks once more, of a port where nobody listens.
    clients.deaths.append((begin_s, time.monotonic() + 2))


def check_that_nothing_is_left(name: str, group: str, counts: Counter[str]) -> None:
    """Of an instance and the ledgers of its group, whose server has ended."""
    if (SHM / name).exists():
        counts["segments left to the next who looks"] += 1
    segment.reap()  # as the next kvctl, or the next start, does it
    ledger.reap()
    left = [path.name for path in SHM.iterdir() if name in path.name or group in path.name]
    assert not left, f"left in shared memory: {left}"
    assert not [info for info in ledger.list_ledgers() if info.group == group]


def report(capsys, seconds: float, clients: Clients) -> None:
    counts = ", ".join(f"{name} {count}" for name, count in sorted(clients.counts.items()))
    with capsys.disabled():
        print(
            f"\nchaos, CHAOS_SEED={SEED}: {seconds:.0f} s; {counts}; {len(clients.failed)} "
            f"requests failed with their server; the longest wait was {clients.longest_s:.0f} s"
        )
