"""Processes that copy from and to each other while blocks and pages come and go, and some die."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from linked import secret_file
from processes import PROGRAMS, LineProgram
from waiting import wait_until

pytestmark = pytest.mark.slow


NODE = Path(__file__).with_name("chaotic_node.py")


class Fleet:
    """Nodes that copy all the time; node `i` listens as `kinds[i - 1]` says."""

    def __init__(self, folder: Path, kinds: list[str]) -> None:
        secret_file(folder)
        self.folder = folder
        self.kinds = dict(enumerate(kinds, 1))
        self.nodes = {node_id: self.start(node_id) for node_id in self.kinds}
        for node in self.nodes.values():
            assert node.read() == "ready"

    def start(self, node_id: int) -> LineProgram:
        return LineProgram(
            NODE,
            str(node_id),
            self.folder,
            self.kinds[node_id],
            *(str(other) for other in self.kinds if other != node_id),
            environment={"PYTHONPATH": os.pathsep.join([str(NODE.parent), str(PROGRAMS)])},
        )

    def disturb(self, rng: random.Random) -> None:
        """Kill one and start it anew, or stop one for longer than a lease."""
        node_id = rng.choice(list(self.nodes))
        node = self.nodes[node_id]
        if rng.randrange(2):
            node.kill()
            self.nodes[node_id] = self.start(node_id)
            assert self.nodes[node_id].read() == "ready"
        else:
            node.stop()
            time.sleep(rng.choice([0.1, 0.5]))
            node.go_on()

    def did(self) -> dict[int, dict[str, int]]:
        return {node_id: json.loads(node.ask("did")) for node_id, node in self.nodes.items()}

    def wait_for_copies(self) -> None:
        """Return when every node has pulled and pushed once more."""
        before = self.did()

        def have_copied() -> bool:
            did = self.did()
            return all(
                did[node_id][what] > before[node_id][what]
                for node_id in did
                for what in ("pulls", "pushes")
            )

        wait_until(have_copied, "a node copies nothing")

    def end(self) -> Counter[str]:
        """What all of them did together; nothing must be wrong."""
        did = self.did()
        for node in self.nodes.values():
            assert node.finish() == 0
        return sum((Counter(one) for one in did.values()), Counter())


@contextmanager
def running(folder: Path, kinds: list[str]) -> Iterator[Fleet]:
    fleet = Fleet(folder, kinds)
    try:
        yield fleet
    finally:
        for node in fleet.nodes.values():
            node.kill()


def test_chaos_copies_correct_bytes_and_leaves_no_pins(tmp_path: Path) -> None:
    rng = random.Random(4)
    with running(tmp_path, ["unix", "unix", "tcp"]) as fleet:
        for _ in range(4):
            fleet.wait_for_copies()
            fleet.disturb(rng)
        fleet.wait_for_copies()
        fleet.end()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("nodes", [2, 4])
def test_chaos_for_two_minutes(kind: str, nodes: int, tmp_path: Path) -> None:
    rng = random.Random(nodes)
    until_s = time.monotonic() + 120
    with running(tmp_path, [kind] * nodes) as fleet:
        while time.monotonic() < until_s:
            fleet.disturb(rng)
            time.sleep(0.2)
        fleet.wait_for_copies()
        print(kind, fleet.end())
