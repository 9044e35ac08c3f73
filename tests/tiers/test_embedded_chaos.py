"""An engine with tiers under limits, sleeps, a neighbour that takes memory, kills and restarts.

`tests/programs/embedded_engine.py` compares every byte of every block it finds, and ends with an
error for a wrong one. Here is who kills it, starts it again on the same disk, and looks at what is
left. The short form has a fixed seed and so many operations; `--soak` takes minutes, and a seed of
its own that it prints (`CHAOS_SEED` sets it).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import embedded_engine
import pytest
from processes import run_python
from stamped_instance import Stamped
from waiting import DEADLINE_S

from kvelastic.config import load
from kvelastic.shared import ledger, segment
from kvelastic.tiers.policy import Rules

pytestmark = pytest.mark.slow


PROGRAM = Path(embedded_engine.__file__)
DISK_BYTES = 24 << 20
HOST_BYTES = 8 << 20
CAPACITY_PAGES = 30
NEIGHBOUR_PAGES = 12
REPORT = 40
NEEDED = ("loaded", "demoted", "dropped", "found", "moved", "forget", "erase", "cancelled")
ENDLESS = 1 << 30


class Life:
    """One process of the engine."""

    def __init__(self, disk: Path, log: Path, environ: dict[str, str], seed: int, *more: str):
        self.log = log
        options = {"--seed": seed, "--disk": disk, "--disk-bytes": DISK_BYTES, "--report": REPORT}
        arguments = [str(part) for option in options.items() for part in option]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), f"embedded_{os.getpid()}", *arguments, *more],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | environ,
            )

    def read(self) -> dict[str, Any]:
        """Its next line. Raises `AssertionError` with what it said if it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine has ended: {self.process.wait()}; {self.log.read_text()}"
        said: dict[str, Any] = json.loads(line)
        return said

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        status = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A ledger of its own, too small for all who share it."""
    name = f"tiers-{os.getpid()}"
    yield {
        "KVELASTIC_LEDGER": name,
        "KVELASTIC_HOST_MEMORY": str(CAPACITY_PAGES * embedded_engine.PAGE_BYTES),
    }
    segment.reap()
    ledger.reap()


def bytes_on_disk(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_blocks * 512
    return found


def chaos(
    tmp_path: Path, environ: dict[str, str], dice: random.Random, lives: int, until_s: float
) -> Counter[str]:
    """Lives that are killed, and a last one that ends by itself. Answers what they have counted."""
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700, exist_ok=True)
    counts: Counter[str] = Counter()
    limit = str(NEIGHBOUR_PAGES * embedded_engine.PAGE_BYTES)
    neighbour = Stamped(
        f"neighbour_{os.getpid()}",
        tmp_path / "neighbour.log",
        str(dice.randrange(1 << 30)),
        **environ,
        KVELASTIC_LIMIT=limit,
    )
    live: list[Life] = []

    def begin(steps: int) -> Life:
        number = counts["lives"]
        counts["lives"] += 1
        host = ("--host-bytes", str(HOST_BYTES)) if number % 2 else ()
        seed = dice.randrange(1 << 30)
        log = tmp_path / f"life{number}.log"
        policy = ("--policy", dice.choice(["write_back", "write_through"]))
        copies = ("--copies", dice.choice(["all", "all", "first"]))
        idle = ("--idle", dice.choice(["0.01", "5"]))
        more = (*host, *policy, *copies, *idle)
        life = Life(disk, log, environ, seed, "--steps", str(steps), *more)
        live.append(life)
        assert life.read() == {"ready": True}
        return life

    try:
        assert neighbour.wait_until_ready() == ""
        # Where one of these never happens the rest says nothing: a busy machine takes longer.
        while (
            counts["lives"] < lives
            or time.monotonic() < until_s
            or any(counts[what] == 0 for what in NEEDED)
        ):
            life = begin(ENDLESS)
            last: dict[str, Any] = {}
            for _ in range(dice.randint(2, 5)):
                last = life.read()
                assert bytes_on_disk(disk) <= DISK_BYTES
            life.kill()
            live.clear()
            counts.update(last)
            assert bytes_on_disk(disk) <= DISK_BYTES
            segment.reap()
            ledger.reap()
        life = begin(6 * REPORT)
        said = life.read()
        while "tiers" not in said:
            said = life.read()
        assert life.wait() == 0, life.log.read_text()
        live.clear()
        counts.update(said["counts"])
        assert said["tiers"]["disk"]["used_bytes"] <= DISK_BYTES
        neighbour.rest()
        counts["neighbour's blocks"] = neighbour.read()["blocks"]
        neighbour.go()
        neighbour.leave()
    finally:
        for life in live:
            life.kill()
        if neighbour.process.poll() is None:
            neighbour.kill()
    return counts


def test_chaos_returns_no_wrong_byte(tmp_path, group) -> None:
    counts = chaos(tmp_path, group, random.Random(16), lives=4, until_s=0.0)
    assert counts["neighbour's blocks"] > 0


@pytest.mark.soak
def test_minutes_of_chaos_return_no_wrong_byte(tmp_path, group, capsys) -> None:
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 1_000_000))
    seconds = float(os.environ.get("CHAOS_SECONDS", "240"))
    with capsys.disabled():
        print(f"\nchaos of tiers: CHAOS_SEED={seed}")
    counts = chaos(
        tmp_path, group, random.Random(seed), lives=4, until_s=time.monotonic() + seconds
    )
    with capsys.disabled():
        print(", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    assert counts["neighbour's blocks"] > 0


def test_cleaned_blocks_are_found_after_a_kill(tmp_path, group, monkeypatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    life = Life(disk, tmp_path / "log", group, 1, "--steps", str(ENDLESS), "--calm")
    demoted = 0
    while demoted < 100:
        demoted = life.read().get("demoted", 0)
    life.kill()
    segment.reap()
    ledger.reap()
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    engine = embedded_engine.open_engine(
        f"second_{os.getpid()}", random.Random(2), disk=disk, disk_bytes=DISK_BYTES
    )
    try:
        for _ in range(60):
            engine.begin()
            engine.end()
        assert engine.counts["loaded"] >= 10, engine.counts
        engine.finish()
    finally:
        assert engine.tiers.close() == []
        engine.pool.close()


def stored_bytes(folder: Path) -> int:
    """Bytes that the files of a folder have on the medium."""
    return sum(512 * file.stat().st_blocks for file in folder.rglob("*"))


def bytes_written_to_the_disk(engine: embedded_engine.Engine) -> int:
    return engine.tiers.stores[0].statistics().bytes_written


def test_busy_write_back_above_the_watermark_writes_nothing(tmp_path, group) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    engine = embedded_engine.open_engine(
        f"writes_nothing_{os.getpid()}",
        random.Random(3),
        settings=load(group),
        disk=disk,
        disk_bytes=DISK_BYTES,
        # It looks all the time, and is never idle for so long.
        rules=Rules(watermark=0.1, idle_after_s=3600, tick_s=0.001),
    )
    try:
        blocks = engine.blocks
        assert blocks.ensure(blocks.available_size() // 2) > 0
        before = stored_bytes(disk)
        for _ in range(300):
            engine.begin()
            engine.end()
            if engine.counts["computed"] > blocks.stats()["blocks_total"] // 2:
                break
        stats = blocks.stats()
        assert stats["blocks_cached"] > 100, "there was something to write"
        assert stats["blocks_clean"] == 0
        assert bytes_written_to_the_disk(engine) == 0
        assert stored_bytes(disk) == before
        # Asked for, all of it is.
        assert engine.tiers.clean_all(DEADLINE_S) == 0
        assert bytes_written_to_the_disk(engine) > 0
        assert stored_bytes(disk) > before
        engine.finish()
    finally:
        assert engine.tiers.close() == []
        engine.pool.close()


def test_process_with_unclosed_tiers_exits_cleanly(tmp_path, group) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    name = f"forgets_{os.getpid()}"
    code = (
        "import random, pathlib, embedded_engine\n"
        f"disk = pathlib.Path({str(disk)!r})\n"
        f"engine = embedded_engine.open_engine({name!r}, random.Random(4), disk=disk)\n"
        "engine.is_calm = True\n"
        "for _ in range(40): engine.step()\n"
    )
    assert run_python("-c", code, environment=group, folder=PROGRAM.parent).stderr == ""
    assert name not in {info.name for info in segment.list_segments()}
