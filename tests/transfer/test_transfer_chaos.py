"""Processes that copy from and to each other while blocks and pages come and go, and some die."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from linked import secret_file


class Fleet:
    def __init__(self, folder: Path, kind: str, nodes: int) -> None:
        secret_file(folder)
        self.folder, self.kind = folder, kind
        self.ids = list(range(1, nodes + 1))
        self.processes = {node_id: self.start(node_id) for node_id in self.ids}
        for process in self.processes.values():
            self.wait_ready(process)

    def start(self, node_id: int) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("chaotic_node.py")
        others = [str(other) for other in self.ids if other != node_id]
        programs = Path(__file__).parents[1] / "programs"
        return subprocess.Popen(
            [sys.executable, str(program), str(node_id), str(self.folder), self.kind, *others],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{program.parent}:{programs}"},
        )

    @staticmethod
    def wait_ready(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    def disturb(self, rng: random.Random) -> None:
        """Kill one and start it anew, or stop one for longer than a lease."""
        node_id = rng.choice(self.ids)
        process = self.processes[node_id]
        if rng.randrange(2):
            process.kill()
            process.communicate()
            self.processes[node_id] = self.start(node_id)
            self.wait_ready(self.processes[node_id])
        else:
            process.send_signal(signal.SIGSTOP)
            threading.Event().wait(rng.choice([0.1, 0.5]))
            process.send_signal(signal.SIGCONT)

    def end(self) -> dict[str, int]:
        """What all of them did together; nothing must be wrong."""
        did: dict[str, int] = {}
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.write("end\n")
            process.stdin.flush()
        for process in self.processes.values():
            out, _ = process.communicate(timeout=120)
            report = json.loads(out)
            assert process.returncode == 0
            assert report["wrong"] == []
            for what, count in report["did"].items():
                did[what] = did.get(what, 0) + count
        return did

    def kill(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


def chaos(folder: Path, kind: str, nodes: int, seconds: float) -> dict[str, int]:
    rng = random.Random(nodes)
    fleet = Fleet(folder, kind, nodes)
    try:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            fleet.disturb(rng)
            threading.Event().wait(0.2)
        return fleet.end()
    finally:
        fleet.kill()


@pytest.mark.parametrize(("kind", "nodes"), [("unix", 2), ("tcp", 2), ("unix", 4), ("tcp", 4)])
def test_no_wrong_byte_and_nothing_pinned(kind: str, nodes: int, tmp_path: Path) -> None:
    assert chaos(tmp_path, kind, nodes, seconds=3.0)["pulls"] > 0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_five_minutes(tmp_path: Path) -> None:
    for kind in ("unix", "tcp"):
        folder = tmp_path / kind
        folder.mkdir()
        did = chaos(folder, kind, nodes=4, seconds=150)
        assert min(did["pulls"], did["pushes"]) > 0
        print(kind, did)
