"""Clusters that pull, push, copy and swap while caches and pages come and go, and some die."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from open_memfds import held_bytes
from ports import free_port

from kvelastic import ledger, link_board, segment_dir

HERE = Path(__file__).parent
ROOM = 14 << 20
"""Of each cluster in the ledger that they share: less than its two pools may have, so that one
takes from another."""
CALLS = (
    "pull_blocks", "pull_cache", "push_blocks", "copy_blocks", "copy_cache", "swap out", "swap in",
)  # fmt: skip


class Fleet:
    """Clusters that know one another, and share a ledger."""

    def __init__(self, folder: Path, kind: str, clusters: int) -> None:
        self.folder, self.kind = folder, kind
        self.group = f"chaos-{os.getpid()}-{kind}-{clusters}"
        first = 9_000_000_000 + os.getpid() * 100
        self.ports = {first + at: free_port() for at in range(clusters)}
        self.capacity_bytes = clusters * ROOM
        self.counts: Counter[str] = Counter()
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def begin(self) -> None:
        self.processes = {one: self.start(one) for one in self.ports}
        for process in self.processes.values():
            hear(process, "ready")

    def start(self, cluster_id: int) -> subprocess.Popen[str]:
        others = [f"{one}:{port}" for one, port in self.ports.items() if one != cluster_id]
        arguments = [cluster_id, self.folder, self.kind, self.ports[cluster_id], *others]
        return subprocess.Popen(
            [sys.executable, str(HERE / "chaotic_cluster.py"), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "KVELASTIC_LEDGER": self.group,
                "KVELASTIC_HOST_MEMORY": str(self.capacity_bytes),
                "KVELASTIC_LOG_LEVEL": "ERROR",
                **self.place(cluster_id),
            },
        )

    def place(self, cluster_id: int) -> dict[str, str]:
        """Over TCP each has a folder of its own, so that it finds no socket of another."""
        own = self.folder / (str(cluster_id) if self.kind == "tcp" else "run")
        own.mkdir(mode=0o700, exist_ok=True)
        if self.kind != "tcp":
            return {"XDG_RUNTIME_DIR": str(own)}
        secret = self.folder / "secret"
        secret.touch(0o600)
        secret.write_text("5" * 64)
        return {"XDG_RUNTIME_DIR": str(own), "KVELASTIC_LINK_SECRET": str(secret)}

    def disturb(self, rng: random.Random) -> None:
        """Kill one and start it anew, stop one for a while, or stop all and count their pages."""
        cluster_id = rng.choice(list(self.processes))
        process = self.processes[cluster_id]
        what = rng.choice(["kill", "stop", "freeze"])
        self.counts[what] += 1
        if what == "kill":
            process.kill()
            process.communicate()
            self.processes[cluster_id] = self.start(cluster_id)
            hear(self.processes[cluster_id], "ready")
        elif what == "stop":
            with stopped([process]):
                threading.Event().wait(rng.choice([0.1, 0.5, 1.5]))
        else:
            with stopped(list(self.processes.values())):
                self.check_grants()

    def check_grants(self) -> None:
        """All are stopped in the middle of what they do: each page that is there was granted."""
        granted: Counter[int] = Counter()
        for info in ledger.list_ledgers():
            if info.group == self.group:
                for member in info.members:
                    granted[member.pid] += member.granted_bytes
        assert granted.total() <= self.capacity_bytes
        for process in self.processes.values():
            held = held_bytes(process.pid)
            assert held <= granted[process.pid], f"{held} bytes, and {granted} are granted"

    def end(self) -> Counter[str]:
        """What all of them did together; nothing must be wrong."""
        for process in self.processes.values():
            say(process)
        for process in self.processes.values():
            hear(process, "stopped")
        self.check_grants()
        for process in self.processes.values():
            say(process)
        for process in self.processes.values():
            out, _ = process.communicate(timeout=200)
            report = json.loads(out)
            assert report["wrong"] == []
            assert process.returncode == 0
            self.counts.update(report["did"])
        return self.counts

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()  # one that has ended is not there any more
            process.communicate()
        segment_dir.reap()
        ledger.reap()


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{word}\n"


@contextlib.contextmanager
def stopped(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def chaos(kind: str, clusters: int, seconds: float) -> Counter[str]:
    rng = random.Random(clusters)
    with tempfile.TemporaryDirectory(prefix="kv") as short:  # paths of sockets have a bound
        fleet = Fleet(Path(short), kind, clusters)
        try:
            fleet.begin()
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                fleet.disturb(rng)
                threading.Event().wait(0.2)
            did = fleet.end()
        finally:
            fleet.close()
        assert not [info for info in ledger.list_ledgers() if info.group == fleet.group]
        assert not [node for node in link_board.nodes() if node.node_id in fleet.ports]
    return did


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "clusters"), [("unix", 2), ("tcp", 2), ("unix", 4), ("tcp", 4)])
def test_no_wrong_byte_and_no_page_without_a_grant(kind: str, clusters: int) -> None:
    did = chaos(kind, clusters, seconds=1.5)
    assert sum(did[call] for call in CALLS) > 0


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_five_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("unix", "tcp"):
        did = chaos(kind, clusters=4, seconds=150)
        with capsys.disabled():
            print(f"\n{kind}: {dict(sorted(did.items()))}")
        assert all(did[call] for call in CALLS)
