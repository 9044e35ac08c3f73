"""Pages of a (simulated) GPU in two processes: the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_every_driver import simulated

PROGRAM = Path(__file__).parents[1] / "programs" / "exchange.py"


def start(role: str, path: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), role, str(path)],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_share_pages(tmp_path: Path) -> None:
    environment = simulated(tmp_path, KVSIM_MEMORY="1G")
    path = tmp_path / "pages"
    with start("give", path, environment) as giver:
        assert giver.stdout is not None
        assert giver.stdin is not None
        assert giver.stdout.readline() == "listening\n"
        with start("take", path, environment) as taker:
            assert taker.stdout is not None
            assert taker.stdout.readline() == "the same pages\n"
        assert taker.returncode == 0
        assert giver.stdout.readline() == f"{taker.pid}\n"
        giver.stdin.write("look\n")
        giver.stdin.close()
        assert giver.stdout.readline() == "99\n", "what the other process wrote"
    assert giver.returncode == 0
