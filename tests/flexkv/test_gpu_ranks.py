"""A rank on a simulated GPU: the manager's process imports its pages, and releases them in time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_rank import BLOCKS_A_PAGE, LAYERS, ROW, block_id
from processes import PROGRAMS, LineProgram
from waiting import wait_until

pytestmark = pytest.mark.slow

PAGE_BYTES = BLOCKS_A_PAGE * ROW

sys.path.insert(0, str(PROGRAMS.parent / "driver"))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[LineProgram, LineProgram]]:
    from test_every_driver import simulated

    environment = simulated(tmp_path, KVSIM_MEMORY="1G")
    program, endpoint = PROGRAMS / "gpu_rank.py", f"ipc://{tmp_path}/r"
    with (
        LineProgram(program, "manager", endpoint, environment=environment) as manager,
        LineProgram(program, "rank", endpoint, environment=environment) as rank,
    ):
        assert manager.read() == "listening"
        assert rank.read() == "registered"
        yield rank, manager
        assert rank.finish() in {0, -signal.SIGKILL}
        assert manager.finish() == 0


def wanted(block: int) -> str:
    return str([(block + at) % 251 for at in range(2 * LAYERS)])


def imports(manager: LineProgram) -> int:
    return int(manager.ask("count cuMemImportFromShareableHandle"))


def wait_until_used(manager: LineProgram, pages: int) -> None:
    """Of the device, by both processes."""
    wait_until(lambda: manager.ask("used 0") == str(pages * PAGE_BYTES), f"{pages} pages in use")


def test_blocks_return_to_other_pages_releasing_unmapped(
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
    rank.ask("unmap 2")
    wait_until_used(manager, 1)
    rank.ask("unmap 5")
    wait_until_used(manager, 0)
    rank.ask("map 6")
    rank.ask("map 0")
    second = [block_id(6, 1), block_id(0, 4), block_id(6, 30)]
    for block in second:
        rank.ask(f"clear {block}")
    assert manager.ask("get 1 " + " ".join(map(str, second))) == "success"
    for was, block in zip(first, second, strict=True):
        assert rank.ask(f"read {block}") == wanted(was)


def test_mapped_page_is_imported_once(two: tuple[LineProgram, LineProgram]) -> None:
    rank, manager = two
    blocks = [block_id(2, 0), block_id(5, 7)]
    for page in (2, 5):
        rank.ask(f"map {page}")
    for prompt in range(3):
        for block in blocks:
            rank.ask(f"write {block}")
        assert manager.ask(f"put {prompt} " + " ".join(map(str, blocks))) == "success"
        assert imports(manager) == 2
    # The same address with another page: no copy may use the old one.
    rank.ask("unmap 5")
    rank.ask("map 5")
    assert manager.ask("get 1 " + " ".join(map(str, blocks))) == "success"
    assert imports(manager) == 3
    assert [rank.ask(f"read {block}") for block in blocks] == list(map(wanted, blocks))
    wait_until_used(manager, 2)


def test_only_so_many_pages_are_kept(two: tuple[LineProgram, LineProgram]) -> None:
    rank, manager = two
    manager.ask(f"keep {2 * PAGE_BYTES}")
    for page in (1, 2, 3):
        rank.ask(f"map {page}")
    for prompt, (page, total) in enumerate([(1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)]):
        block = block_id(page, 1)
        rank.ask(f"write {block}")
        assert manager.ask(f"put {prompt} {block}") == "success"
        assert imports(manager) == total


def test_stopped_server_does_not_block_unmap(
    two: tuple[LineProgram, LineProgram],
) -> None:
    rank, manager = two
    rank.ask("map 1")
    rank.ask(f"write {block_id(1, 3)}")
    assert manager.ask(f"put 1 {block_id(1, 3)}") == "success"
    manager.stop()
    try:
        assert rank.ask("unmap 1") == "0"
        rank.ask("map 2")
    finally:
        manager.go_on()
    wait_until_used(manager, 1)


def test_a_dead_ranks_pages_are_released(two: tuple[LineProgram, LineProgram]) -> None:
    rank, manager = two
    rank.ask("map 1")
    rank.ask(f"write {block_id(1, 3)}")
    assert manager.ask(f"put 1 {block_id(1, 3)}") == "success"
    rank.process.kill()
    rank.process.wait()
    wait_until_used(manager, 0)


def test_unmapped_page_fails_the_copy(two: tuple[LineProgram, LineProgram]) -> None:
    rank, manager = two
    rank.ask("map 1")
    rank.ask(f"write {block_id(1, 3)}")
    assert manager.ask(f"put 1 {block_id(1, 3)} {block_id(4, 0)}") == "failed"
    assert manager.ask(f"put 2 {block_id(1, 3)}") == "success"
