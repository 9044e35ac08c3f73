"""A rank on a simulated GPU: its pages are handed to the manager's process, copy by copy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_rank import LAYERS, block_id
from processes import PROGRAMS, LineProgram

pytestmark = pytest.mark.slow


sys.path.insert(0, str(PROGRAMS.parent / "contract"))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[LineProgram, LineProgram]]:
    from test_drivers import simulated

    environment = simulated(tmp_path, KVSIM_MEMORY="1G")
    program, endpoint = PROGRAMS / "gpu_rank.py", f"ipc://{tmp_path}/r"
    with (
        LineProgram(program, "manager", endpoint, environment=environment) as manager,
        LineProgram(program, "rank", endpoint, environment=environment) as rank,
    ):
        assert manager.read() == "listening"
        assert rank.read() == "registered"
        yield rank, manager
        assert (rank.finish(), manager.finish()) == (0, 0)


def wanted(block: int) -> str:
    return str([(block + at) % 251 for at in range(2 * LAYERS)])


def test_blocks_come_back_onto_other_pages_and_nothing_is_kept(
    two: tuple[LineProgram, LineProgram],
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


def test_a_page_that_is_not_mapped_is_a_failed_copy(two: tuple[LineProgram, LineProgram]) -> None:
    rank, manager = two
    rank.ask("map 1")
    rank.ask(f"write {block_id(1, 3)}")
    assert manager.ask(f"put 1 {block_id(1, 3)} {block_id(4, 0)}") == "failed"
    assert manager.ask(f"put 2 {block_id(1, 3)}") == "success"
