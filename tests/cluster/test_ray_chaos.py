"""Hosts, networks, replicas and engines fail under load, while limits and sleeps change.

A request that had not begun is never lost. A begun stream ends whole, or with the error event after
a correct beginning. Afterwards Ray's sums are the ledgers', and nothing is left of what has ended.
How long the ends and the first answers took is printed, and asserted nowhere.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import needs
import psutil
import pytest
from ray_hosts import RayHosts
from test_ray_serve import CONFIG, FAKE, MIB_PER_HOST, check_sums, node_states
from waiting import wait_until

from kvelastic.integration.ray.settings import LAUNCHER

pytestmark = [needs.ray, needs.hosts]

TOKENS = 30
STREAMS, WHOLES = 4, 2
GUARD_S = 1200.0
HANDOVER = {"retry_for": GUARD_S, "resources": {"host0": 0.01}}
"""The front waits as long as a slow machine takes to start replicas."""


@dataclass
class Outcomes:
    """What came of the requests."""

    whole: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    cut_at_s: list[float] = field(default_factory=list)
    firsts: list[tuple[float, float, str]] = field(default_factory=list)
    """When a request was sent, how long its first token took, and the failed attempts before."""

    def judge(self, model: str, body: str, *, is_stream: bool) -> None:
        if not is_stream:
            fine = json.loads(body)["choices"][0]["text"] == "x " * TOKENS
            self.whole[model] += fine
            self.faults += [] if fine else [body]
            return
        events = [e.removeprefix("data: ") for e in body.split("\n\n") if e]
        *tokens, last = events or [""]
        texts = [json.loads(e)["choices"][0]["text"] for e in tokens if "choices" in e]
        begun = [f"t{number} " for number in range(len(tokens))]
        if last == "[DONE]" and texts == begun and len(texts) == TOKENS:
            self.whole[model] += 1
        elif texts == begun and texts and '"replica_lost"' in last:
            self.cut_at_s.append(time.monotonic())
        else:
            self.faults.append(body)


class Clients:
    """Threads that ask both models without pause."""

    def __init__(self, cluster: RayHosts) -> None:
        self.outcomes = Outcomes()
        self._cluster = cluster
        self._stops = threading.Event()
        works = [True] * STREAMS + [False] * WHOLES
        self._threads = [
            threading.Thread(target=self._run, args=(("chat", "code")[number % 2], is_stream))
            for number, is_stream in enumerate(works)
        ]

    def _run(self, model: str, is_stream: bool) -> None:
        body = {
            "model": model,
            "prompt": "x",
            "max_tokens": TOKENS,
            "stream": is_stream,
            "fake": {"token_s": 0.02},
        }
        with self._cluster.hosts[0].network(), self._cluster.client() as client:
            while not self._stops.is_set():
                self._ask(client, model, body)

    def _ask(self, client: httpx.Client, model: str, body: dict[str, Any]) -> None:
        began_s = time.monotonic()
        text = ""
        try:
            with client.stream("POST", "/v1/completions", json=body, timeout=GUARD_S) as answer:
                for piece in answer.iter_text():
                    if not text:
                        tried = answer.headers.get("x-kvelastic-tried", "")
                        self.outcomes.firsts.append((began_s, time.monotonic() - began_s, tried))
                    text += piece
        except httpx.HTTPError as error:
            self.outcomes.faults.append(f"{error!r} after {text!r}")
            return
        if answer.status_code == 200:
            self.outcomes.judge(model, text, is_stream=body["stream"])
        else:
            self.outcomes.faults.append(f"{answer.status_code} {text}")

    def wait_for_more(self, count: int) -> None:
        """Until so many more requests of each model have ended whole."""
        before = Counter(self.outcomes.whole)
        wait_until(
            lambda: all(self.outcomes.whole[m] >= before[m] + count for m in ("chat", "code")),
            f"no request ends any more: {self.outcomes.whole}",
        )

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stops.set()
        for thread in self._threads:
            thread.join()


class Operator:
    """Changes limits and puts replicas to sleep and wakes them, in a thread."""

    def __init__(self, cluster: RayHosts, seed: int) -> None:
        self.statuses: Counter[int] = Counter()
        self._cluster = cluster
        self._random = random.Random(seed)
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._cluster.hosts[0].network(), self._cluster.client() as client:
            while not self._stops.is_set():
                replicas = client.get("/kvelastic/replicas").json()["replicas"]
                if replicas:
                    self._change(client, self._random.choice(replicas)["replica"])
                self._stops.wait(0.1)

    def _change(self, client: httpx.Client, replica: str) -> None:
        limit = self._random.choice(["64M", "100M", "none"])
        calls = [
            lambda: client.patch(f"/memory/{replica}", json={"limit": limit}),
            lambda: client.post(f"/action/sleep/{replica}"),
            lambda: client.post(f"/action/wakeup/{replica}"),
        ]
        self.statuses[self._random.choice(calls)().status_code] += 1

    def __enter__(self) -> Operator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stops.set()
        self._thread.join()


class Failures:
    """Each breaks something and mends what Ray does not mend; returns when it was broken."""

    def __init__(self, cluster: RayHosts, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.at_s: list[tuple[str, float]] = []
        self.kinds: list[Callable[[], None]] = [
            self.engine,
            self.replica,
            self.short_cut,
            self.long_cut,
            self.host,
        ]

    def run(self, kind: Callable[[], None], clients: Clients) -> None:
        began_s = time.monotonic()
        self.at_s.append((kind.__name__, began_s))
        kind()
        print(f"{kind.__name__}: over after {time.monotonic() - began_s:.1f} s", flush=True)
        clients.wait_for_more(5)

    def engine(self) -> None:
        found = [process for host in self.cluster.hosts for process in engines(host)]
        if found:  # else the last failure has ended them all, and others start
            self.random.choice(found).kill()

    def replica(self) -> None:
        host = self.random.choice(self.cluster.hosts)
        for process in host.find("ray::ServeReplica:kvelastic:KvEngine:")[:1]:
            process.kill()

    def short_cut(self) -> None:
        """Shorter than Ray takes to notice."""
        with self._cut():
            pass

    def long_cut(self) -> None:
        """Until the head takes the host for dead; Ray there ends when it learns that."""
        with self._cut():
            self._wait_for_second("dead")
        wait_until(self.cluster.has_left)
        wait_until(lambda: not self.cluster.hosts[1].find(str(FAKE)))  # engines end with Ray
        self.cluster.rejoin()

    def host(self) -> None:
        self.cluster.kill_second()
        self._wait_for_second("dead")
        self.cluster.replace_second()

    @contextlib.contextmanager
    def _cut(self) -> Iterator[None]:
        self.cluster.cut()
        try:
            yield
        finally:
            self.cluster.heal()

    def _wait_for_second(self, state: str) -> None:
        second = self.cluster.addresses[1]
        wait_until(lambda: node_states(self.cluster).get(second) == state)


def engines(host: Any) -> list[psutil.Process]:
    return [each for each in host.find(str(FAKE)) if LAUNCHER not in each.cmdline()]


def is_calm(cluster: RayHosts) -> bool:
    """Two replicas of each model work, and no process or ledger entry of another one is left.

    Starts Ray again where it has ended: a slow machine makes a short cut a long one.
    """
    if cluster.has_left():
        cluster.rejoin()
    replicas = cluster.replicas()
    working = [each for each in replicas if each["state"] in {"awake", "asleep"}]
    places = Counter((each["model"], each["node"]) for each in working)
    if len(replicas) != len(working) or sorted(places.values()) != [1, 1, 1, 1]:
        return False
    listed = cluster.get("/memory").json()["instances"]
    names = sorted(row["name"] for row in listed)
    return names == sorted(each["instance"] for each in working) and all(
        len(engines(host)) == 2 for host in cluster.hosts
    )


def unrest(cluster: RayHosts) -> str:
    """What `is_calm` looks at, and what the hosts have logged."""
    engine_counts = [len(engines(host)) for host in cluster.hosts]
    return "\n".join(
        [
            f"Ray has left: {cluster.has_left()}, engines on each host: {engine_counts}",
            *(f"replica {each}" for each in cluster.replicas()),
            f"memory {cluster.get('/memory').text}",
            cluster.logs(),
        ]
    )


def check_engines(cluster: RayHosts) -> None:
    """No engine has got a request while it slept, or a sleep while it worked."""
    for host in cluster.hosts:
        for process in engines(host):
            arguments = process.cmdline()
            port = arguments[arguments.index("--port") + 1]
            with host.network(), httpx.Client() as client:
                counts = client.get(f"http://127.0.0.1:{port}/fake/state").json()["counts"]
            assert not counts.keys() & {"requests_while_asleep", "slept_while_busy"}, counts


@pytest.mark.parametrize(
    "length_s",
    [
        pytest.param(60.0, id="short", marks=[pytest.mark.matrix, pytest.mark.timeout(1800)]),
        pytest.param(600.0, id="long", marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_failures_under_load_lose_no_unstarted_request(length_s: float) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}, {MIB_PER_HOST} MiB on each host")
    with RayHosts(2) as cluster:
        cluster.deploy({**CONFIG, "front": HANDOVER})
        wait_until(lambda: is_calm(cluster))
        failures = Failures(cluster, seed)
        end_s = time.monotonic() + length_s
        with Clients(cluster) as clients:
            clients.wait_for_more(5)
            with Operator(cluster, seed) as operator:
                for each in failures.kinds:  # first alone, then also during another one's end
                    failures.run(each, clients)
                    wait_until(lambda: is_calm(cluster), lambda: unrest(cluster))
                while time.monotonic() < end_s:
                    failures.run(failures.random.choice(failures.kinds), clients)
            wait_until(lambda: is_calm(cluster), lambda: unrest(cluster))
            clients.wait_for_more(5)
        wait_until(lambda: is_calm(cluster), lambda: unrest(cluster))
        check_engines(cluster)
        check_sums(cluster)
    outcomes = clients.outcomes
    print(f"whole {dict(outcomes.whole)}, cut {len(outcomes.cut_at_s)}, {operator.statuses}")
    for (kind, at_s), (_, next_s) in pairwise([*failures.at_s, ("", math.inf)]):
        cuts = [f"{cut_s - at_s:.1f}" for cut_s in outcomes.cut_at_s if at_s <= cut_s < next_s]
        firsts = [(s, tried) for sent_s, s, tried in outcomes.firsts if at_s <= sent_s < next_s]
        slowest = [f"{first_s:.1f} (tried {tried})" for first_s, tried in sorted(firsts)[-3:]]
        print(f"{kind}: streams ended after {cuts} s, slowest first tokens {slowest} s")
    assert outcomes.faults == []
