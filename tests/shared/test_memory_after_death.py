"""A GPU's memory of a killed process returns before its liveness lock, or after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_instance import BLOCKS_PER_PAGE, PAGE_BYTES, Instance
from simulated_machine import SimulatedMachine
from waiting import wait_until

from kvelastic.shared import ledger, segment

CAPACITY = 30
"""Pages: 0.95 of a device of 32."""
HELD = 24


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[SimulatedMachine]:
    with SimulatedMachine(
        tmp_path,
        memory_bytes=32 * PAGE_BYTES,
        KVELASTIC_DEVICE="cuda",
        KVELASTIC_LEDGER=f"kvtest-dead-{os.getpid()}",
        KVELASTIC_PAGE_PREALLOC_ENABLED="false",
        KVSIM_LINGER=str(tmp_path / "linger"),
    ) as machine:
        yield machine
    ledger.reap()
    segment.reap()


def blocks_of(pages: int) -> int:
    """All blocks of so many pages, with the null block."""
    return pages * BLOCKS_PER_PAGE - 1


def foreign_pages(gpu: SimulatedMachine) -> int:
    """What the ledger takes for other processes' memory."""
    group = gpu.environment["KVELASTIC_LEDGER"]
    (info,) = (info for info in ledger.list_ledgers() if info.group == group)
    return info.others_bytes // PAGE_BYTES


def test_memory_returned_after_death_wakes_the_waiter(
    gpu: SimulatedMachine, tmp_path: Path
) -> None:
    """An engine that waits for blocks hears of them, although it asks for none meanwhile."""
    linger = tmp_path / "linger"
    linger.touch()
    with Instance(**gpu.environment) as victim, Instance(**gpu.environment) as heir:
        assert victim.alloc(blocks_of(HELD)) is not None
        assert heir.alloc(blocks_of(2)) is not None
        victim.kill()
        assert heir.alloc(20 * BLOCKS_PER_PAGE) is None, "the ledger grants it, the driver refuses"
        seen = heir.ask("availability_epoch")
        assert gpu.used_bytes() > HELD * PAGE_BYTES
        linger.unlink()
        wait_until(
            lambda: heir.ask("availability_epoch") != seen, "no blocks are said to have come"
        )
        assert heir.alloc(20 * BLOCKS_PER_PAGE) is not None


def test_lingering_memory_counts_as_other_processes_usage(
    gpu: SimulatedMachine, tmp_path: Path
) -> None:
    """A refusal has the device looked at: what lingers counts, and is not granted again."""
    (tmp_path / "linger").touch()
    with Instance(**gpu.environment) as victim, Instance(**gpu.environment) as heir:
        assert victim.alloc(blocks_of(HELD)) is not None
        assert heir.alloc(blocks_of(2)) is not None
        victim.kill()
        assert heir.alloc(20 * BLOCKS_PER_PAGE) is None
        wait_until(lambda: foreign_pages(gpu) == HELD, "it is not counted")
        heir.ask("check_integrity")


def test_early_returned_memory_hides_no_foreign_usage(
    gpu: SimulatedMachine, tmp_path: Path
) -> None:
    """Between the two the dead member's grant stands, and foreign memory would count as its own."""
    foreign = 5
    other_environment = gpu.environment | {"KVELASTIC_LEDGER": f"kvtest-other-{os.getpid()}"}
    with (
        Instance(**other_environment) as outside,
        Instance(**gpu.environment) as victim,
        Instance(**gpu.environment) as heir,
    ):
        assert outside.alloc(blocks_of(foreign)) is not None
        assert victim.alloc(blocks_of(20)) is not None
        assert heir.alloc(blocks_of(2)) is not None
        victim.ask("drop_memory")
        assert gpu.used_bytes() == (foreign + 2) * PAGE_BYTES
        assert heir.alloc(20 * BLOCKS_PER_PAGE) is None, "the victim may live"
        victim.kill()
        free = CAPACITY - foreign - 2
        wait_until(lambda: heir.alloc(free * BLOCKS_PER_PAGE) is not None, "it is not granted")
        wait_until(lambda: foreign_pages(gpu) == foreign, "foreign memory is not counted")
        assert heir.alloc(foreign * BLOCKS_PER_PAGE) is None
        heir.ask("check_integrity")
