"""Clusters that pull, push, copy and swap while caches and pages come and go, and some die."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from open_memfds import held_bytes
from ports import free_port
from processes import PROGRAMS, LineProgram
from waiting import wait_until

from kvelastic.shared import ledger, link_status, segment_listing

pytestmark = pytest.mark.slow


CLUSTER = Path(__file__).with_name("chaotic_cluster.py")
ROOM = 14 << 20
"""Of each cluster in the ledger that they share: less than its two pools may have, so that one
takes from another."""
REMOTE_CALLS = ("pull_blocks", "pull_cache", "push_blocks")
CALLS = (*REMOTE_CALLS, "copy_blocks", "copy_cache", "swap out", "swap in")
DISTURBANCES = ("kill", "stop", "freeze")


class Fleet:
    """Clusters that know one another, and share a ledger; each listens as its kind says."""

    def __init__(self, folder: Path, kinds: list[str]) -> None:
        self.folder = folder
        self.group = f"chaos-{os.getpid()}-{'-'.join(kinds)}"
        first = 9_000_000_000 + os.getpid() * 100
        self.kinds = dict(enumerate(kinds, first))
        self.ports = {cluster_id: free_port() for cluster_id in self.kinds}
        self.capacity_bytes = len(kinds) * ROOM
        self.counts: Counter[str] = Counter()
        self.clusters: dict[int, LineProgram] = {}
        self.secret = folder / "secret"
        self.secret.touch(0o600)
        self.secret.write_text("5" * 64)

    def begin(self) -> None:
        self.clusters = {one: self.start(one) for one in self.ports}
        for cluster in self.clusters.values():
            assert cluster.read() == "ready"

    def start(self, cluster_id: int) -> LineProgram:
        others = [f"{one}:{port}" for one, port in self.ports.items() if one != cluster_id]
        # Over TCP each has a folder of its own, so that it finds no socket of another.
        own = self.folder / (str(cluster_id) if self.kinds[cluster_id] == "tcp" else "run")
        own.mkdir(mode=0o700, exist_ok=True)
        return LineProgram(
            CLUSTER,
            str(cluster_id),
            self.folder,
            str(self.ports[cluster_id]),
            *others,
            environment={
                "KVELASTIC_LEDGER": self.group,
                "KVELASTIC_HOST_MEMORY": str(self.capacity_bytes),
                "KVELASTIC_LOG_LEVEL": "ERROR",
                "KVELASTIC_LINK_SECRET": str(self.secret),
                "PYTHONPATH": str(PROGRAMS),
                "XDG_RUNTIME_DIR": str(own),
            },
        )

    def disturb(self, what: str, rng: random.Random) -> None:
        """Kill one and start it anew, stop one for a while, or stop all and count their pages."""
        cluster_id = rng.choice(list(self.clusters))
        cluster = self.clusters[cluster_id]
        self.counts[what] += 1
        if what == "kill":
            cluster.kill()
            self.clusters[cluster_id] = self.start(cluster_id)
            assert self.clusters[cluster_id].read() == "ready"
        elif what == "stop":
            with stopped([cluster]):
                time.sleep(rng.choice([0.1, 0.5, 1.5]))
        else:
            with stopped(self.clusters.values()):
                self.check_grants()

    def check_grants(self) -> None:
        """All are stopped in the middle of what they do: each page that is there was granted."""
        granted: Counter[int] = Counter()
        for info in ledger.list_ledgers():
            if info.group == self.group:
                for member in info.members:
                    granted[member.pid] += member.granted_bytes
        assert granted.total() <= self.capacity_bytes
        for cluster in self.clusters.values():
            held = held_bytes(cluster.pid)
            assert held <= granted[cluster.pid], f"{held} bytes, and {granted} are granted"

    def wait_for_copies(self) -> None:
        """Return when every cluster has copied from or to another one once more."""

        def copies() -> dict[int, int]:
            did = {one: json.loads(cluster.ask("did")) for one, cluster in self.clusters.items()}
            return {one: sum(did[one].get(call, 0) for call in REMOTE_CALLS) for one in did}

        before = copies()
        wait_until(
            lambda: all(count > before[one] for one, count in copies().items()),
            "a cluster copies nothing",
        )

    def end(self) -> Counter[str]:
        """What all of them did together; nothing must be wrong."""
        for cluster in self.clusters.values():
            cluster.send("stop")
        for cluster in self.clusters.values():
            assert cluster.read() == "stopped"
        self.check_grants()
        for cluster in self.clusters.values():
            cluster.send("report")
        for cluster in self.clusters.values():
            report = json.loads(cluster.read())
            assert report["wrong"] == []
            assert cluster.finish() == 0
            self.counts.update(report["did"])
        return self.counts

    def close(self) -> None:
        for cluster in self.clusters.values():
            cluster.kill()
        segment_listing.reap()
        ledger.reap()


@contextlib.contextmanager
def stopped(clusters: Iterable[LineProgram]) -> Iterator[None]:
    for cluster in clusters:
        cluster.stop()
    try:
        yield
    finally:
        for cluster in clusters:
            cluster.go_on()


@contextlib.contextmanager
def running(kinds: list[str]) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="kv") as short:  # paths of sockets have a bound
        fleet = Fleet(Path(short), kinds)
        try:
            fleet.begin()
            yield fleet
        finally:
            fleet.close()
    assert not [info for info in ledger.list_ledgers() if info.group == fleet.group]
    assert not [node for node in link_status.nodes() if node.node_id in fleet.ports]


def test_disturbances_corrupt_nothing_and_exceed_no_grant() -> None:
    rng = random.Random(4)
    with running(["unix", "unix", "tcp"]) as fleet:
        for what in DISTURBANCES:
            fleet.wait_for_copies()
            fleet.disturb(what, rng)
        fleet.wait_for_copies()
        fleet.end()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("clusters", [2, 4])
def test_random_disturbances_for_two_minutes(
    kind: str, clusters: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(clusters)
    until_s = time.monotonic() + 120
    with running([kind] * clusters) as fleet:
        while time.monotonic() < until_s:
            fleet.disturb(rng.choice(DISTURBANCES), rng)
            time.sleep(0.2)
        did = fleet.end()
    with capsys.disabled():
        print(f"\n{kind}: {dict(sorted(did.items()))}")
    assert all(did[call] for call in CALLS)
