"""A rank on a simulated GPU: its pages are handed to the manager's process, copy by copy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from gpu_rank import LAYERS, block_id

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "contract"))


class Process:
    def __init__(self, role: str, folder: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "programs" / "gpu_rank.py"), role, f"ipc://{folder}/r"],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"ended with {self.process.wait()}"
        return line

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.line()

    def end(self) -> None:
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    from test_drivers import simulated

    environment = simulated(tmp_path, KVSIM_MEMORY="1G")
    with ExitStack() as stack:
        manager = Process("manager", tmp_path, environment)
        stack.callback(manager.end)
        rank = Process("rank", tmp_path, environment)
        stack.callback(rank.end)
        assert manager.line() == "listening"
        assert rank.line() == "registered"
        yield rank, manager


def wanted(block: int) -> str:
    return str([(block + at) % 251 for at in range(2 * LAYERS)])


def test_blocks_come_back_onto_other_pages_and_nothing_is_kept(
    two: tuple[Process, Process],
) -> None:
    rank, manager = two
    first = [block_id(2, 0), block_id(2, 31), block_id(5, 7)]
    for page in (2, 5):
        rank.ask(f"map {page}")
    for block in first:
        rank.ask(f"write {block}")
    assert manager.ask("put 1 " + " ".join(map(str, first))) == "success"
    # Were a page kept over there, its memory would not be the device's again.
    assert rank.ask("unmap 2") == "1"
    assert rank.ask("unmap 5") == "0"
    rank.ask("map 6")
    rank.ask("map 0")
    second = [block_id(6, 1), block_id(0, 4), block_id(6, 30)]
    for block in second:
        rank.ask(f"clear {block}")
    assert manager.ask("get 1 " + " ".join(map(str, second))) == "success"
    for was, block in zip(first, second, strict=True):
        assert rank.ask(f"read {block}") == wanted(was)


def test_a_page_that_is_not_mapped_is_a_failed_copy(two: tuple[Process, Process]) -> None:
    rank, manager = two
    rank.ask("map 1")
    rank.ask(f"write {block_id(1, 3)}")
    assert manager.ask(f"put 1 {block_id(1, 3)} {block_id(4, 0)}") == "failed"
    assert manager.ask(f"put 2 {block_id(1, 3)}") == "success"
